// Words and numbers to a Slot: counts first, then ranges, then ids, and only then is anything handed over.
#include "slot_words.h"

#include <algorithm>
#include <climits>
#include <cmath>

namespace cavectl {

namespace {

constexpr int64_t kHeadWords = 11, kHeadNumbers = 6;
constexpr int64_t kMost = INT32_MAX;

// The head of a slot's words, in their order.
struct Head {
  int64_t slot, choice, seed, top_k, repeat_last_n, min_tokens, logprobs, biases, stops, prompt, output;
};
static_assert(sizeof(Head) == kHeadWords * sizeof(int64_t));

Head read_head(const int64_t* words) {
  Head head;
  std::copy(words, words + kHeadWords, reinterpret_cast<int64_t*>(&head));
  return head;
}

bool between(double value, double low, double high) { return value >= low && value <= high; }  // false for NaN

// All counts non-negative, and together no more than there is.
const char* check_counts(const Head& head, int64_t words_left, int64_t numbers_left) {
  for (int64_t count : {head.biases, head.stops, head.prompt, head.output}) {
    if (count < 0) return "a slot has a negative count";
    if (count > words_left) return "a slot's words end early";
    words_left -= count;
  }
  return head.biases > numbers_left ? "a slot's numbers end early" : nullptr;
}

const char* check_head(const Head& head) {
  if (head.slot < 0 || head.slot > kMost) return "a sampling slot's number is out of range";
  if (head.choice < 0 || head.choice > int64_t(UINT32_MAX)) return "choice is out of range";
  if (head.top_k < 0) return "top_k is out of range";
  if (head.repeat_last_n < -1) return "repeat_last_n is out of range";
  if (head.logprobs < -1) return "logprobs is out of range";
  return nullptr;
}

const char* check_params(const SlotParams& p) {
  if (p.temperature < 0) return "temperature is out of range";
  if (!between(p.top_p, 0, 1)) return "top_p is out of range";
  if (!between(p.min_p, 0, 1)) return "min_p is out of range";
  if (p.repetition_penalty <= 0) return "repetition_penalty is out of range";
  for (double value : {p.temperature, p.repetition_penalty, p.presence_penalty, p.frequency_penalty}) {
    if (!std::isfinite(value)) return "sampling parameters is out of range";
  }
  return nullptr;
}

bool inside(const int64_t* ids, int64_t count, int64_t vocab) {
  return std::all_of(ids, ids + count, [vocab](int64_t id) { return id >= 0 && id < vocab; });
}

SlotParams read_params(const Head& head, const double* numbers) {
  SlotParams p;
  p.temperature = numbers[0];
  p.top_p = numbers[1];
  p.min_p = numbers[2];
  p.repetition_penalty = numbers[3];
  p.presence_penalty = numbers[4];
  p.frequency_penalty = numbers[5];
  // what is more than any vocabulary or sequence means the same as the most that fits
  p.top_k = int32_t(std::min(head.top_k, kMost));
  p.repeat_last_n = int32_t(std::min(head.repeat_last_n, kMost));
  p.min_tokens = int32_t(std::clamp<int64_t>(head.min_tokens, 0, kMost));
  p.logprobs = int32_t(std::min(head.logprobs, kMost));
  p.seed = uint64_t(head.seed);
  p.choice = uint32_t(head.choice);
  return p;
}

const char* read_bias(const int64_t* ids, const double* values, int64_t count, int64_t vocab, SlotParams& p) {
  if (!inside(ids, count, vocab)) return "logit_bias is out of range";
  p.bias.reserve(size_t(count));
  for (int64_t i = 0; i < count; ++i) {
    if (!(values[i] < INFINITY)) return "logit_bias is out of range";
    p.bias.emplace_back(int32_t(ids[i]), values[i]);
  }
  return nullptr;
}

// A stop id that the vocabulary does not have can be neither drawn nor masked.
const char* read_stops(const int64_t* ids, int64_t count, int64_t vocab, SlotParams& p) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0) return "a stop id is negative";
    if (ids[i] < vocab) p.stop_ids.push_back(int32_t(ids[i]));
  }
  return nullptr;
}

const char* read_tokens(const int64_t* ids, const Head& head, int64_t vocab, Slot& slot) {
  if (!inside(ids, head.prompt + head.output, vocab)) return "a token id is outside the vocabulary";
  slot.tokens.reserve(size_t(head.prompt + head.output));
  slot.tokens.assign(ids, ids + head.prompt);
  slot.prompt_tokens = size_t(head.prompt);
  for (int64_t i = 0; i < head.output; ++i) slot.append(int32_t(ids[head.prompt + i]));
  return nullptr;
}

}  // namespace

const char* parse_slot(const int64_t* words, int64_t word_count, const double* numbers, int64_t number_count, int32_t vocab, Slot& out,
                       int32_t& slot_index, int64_t& used_words, int64_t& used_numbers) {
  if (word_count < kHeadWords) return "a slot's words end early";
  if (number_count < kHeadNumbers) return "a slot's numbers end early";
  const Head head = read_head(words);
  if (const char* wrong = check_counts(head, word_count - kHeadWords, number_count - kHeadNumbers)) return wrong;
  if (const char* wrong = check_head(head)) return wrong;
  Slot slot;
  slot.params = read_params(head, numbers);
  if (const char* wrong = check_params(slot.params)) return wrong;
  const int64_t *bias = words + kHeadWords, *stops = bias + head.biases, *tokens = stops + head.stops;
  if (const char* wrong = read_bias(bias, numbers + kHeadNumbers, head.biases, vocab, slot.params)) return wrong;
  if (const char* wrong = read_stops(stops, head.stops, vocab, slot.params)) return wrong;
  if (const char* wrong = read_tokens(tokens, head, vocab, slot)) return wrong;
  out = std::move(slot);
  slot_index = int32_t(head.slot);
  used_words = kHeadWords + head.biases + head.stops + head.prompt + head.output;
  used_numbers = kHeadNumbers + head.biases;
  return nullptr;
}

}  // namespace cavectl
