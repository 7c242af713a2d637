// The sampler: one row of logits and one sequence's parameters to one token. engine/runtime/sampler.py in C++.
//
// Owned here: nothing but the arithmetic of engine/types.py SamplingParams; everything from the first bias on is float64. Invariant:
// a token is a function of the logits, the parameters, the sequence so far and (seed, choice, position), and of nothing else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cavectl {

struct SlotParams {
  double temperature = 1, top_p = 1, min_p = 0;
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  int32_t top_k = 0, repeat_last_n = 64;
  uint64_t seed = 0;
  uint32_t choice = 0;
  int32_t min_tokens = 0;
  int32_t logprobs = -1;  // -1: none; 0: of the chosen token; k: and the k best
  std::vector<std::pair<int32_t, double>> bias;
  std::vector<int32_t> stop_ids;
};

// What one sampled sequence has said so far, and how it picks.
struct Slot {
  bool open = false;
  SlotParams params;
  std::vector<int32_t> tokens;  // prompt, then output
  size_t prompt_tokens = 0;
  std::unordered_map<int32_t, int32_t> counts;  // of output tokens; 0 of what may become one in this step

  void append(int32_t token) {
    tokens.push_back(token);
    ++counts[token];
  }
  void take_back() {
    --counts[tokens.back()];
    tokens.pop_back();
  }
};

enum SampleStatus : int32_t { kNotSampled = 0, kSampled = 1, kNotFinite = 2, kNothingAllowed = 3 };

struct Sample {
  int32_t status = kNotSampled;
  int32_t token = -1;
  double logprob = 0;
  std::vector<std::pair<int32_t, double>> top;  // best first
};

// Memory of one thread, kept between calls so that a step allocates nothing once it has grown.
struct SampleScratch {
  std::vector<double> scores;       // [vocab]: what bias, penalties and masks make of the logits
  std::vector<double> weights;      // of those that are left
  std::vector<int32_t> ids;         // those that are left, ascending
  std::vector<double> peaks, sums;  // the best, and the sum of weights, of each block of ids
  std::vector<double> spare;        // what is ordered in place
  std::vector<uint64_t> seen;       // bits over ids, all zero between calls

  // Room for a vocabulary of so many: sampling from one does not allocate then, `Sample::top` apart.
  void grow(size_t vocab) {
    const size_t blocks = vocab / 64 + 1;
    for (auto* all : {&scores, &weights, &spare}) all->reserve(vocab);
    for (auto* each : {&peaks, &sums}) each->reserve(blocks);
    ids.reserve(vocab);
    seen.resize(blocks);
  }
};

// logits: float32 [vocab]. allowed: bitset over ids, (vocab + 7) / 8 bytes, or null. The slot is not changed. Status kNotFinite when a
// logit is NaN or infinite (checked here) or when bias and penalties leave the range of float64; kNothingAllowed when biases, stop ids
// and masks leave no id. Throws std::bad_alloc where the scratch or `out.top` still has to grow, and never else.
void sample(const float* logits, int32_t vocab, const Slot& slot, const uint8_t* allowed, SampleScratch& scratch, Sample& out);

// float64 in [0, 1) of Philox4x32-10, as engine/runtime/philox.py.
double uniform(uint64_t seed, uint32_t choice, uint32_t position, uint32_t draw, uint32_t node);

}  // namespace cavectl
