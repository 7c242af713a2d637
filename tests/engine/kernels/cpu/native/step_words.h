// Writes the words of steps (cavectl.h) for the native test programs, and keeps room for results.
//
// Invariant: every array handed over is exactly as long as it is said to be.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "cavectl.h"

namespace tiny {

struct Sampling {
  int64_t top_k = 0, repeat_last_n = 64, min_tokens = 0, logprobs = -1, seed = 0;
  double temperature = 0, top_p = 1, min_p = 0, repetition = 1, presence = 0, frequency = 0;
  std::vector<int64_t> bias_ids, stop_ids, prompt, output;
  std::vector<double> bias;
};

struct RowWords {
  int64_t position = 0;
  std::vector<int64_t> tokens;
  int64_t slot = -1, mask = -1;
  std::vector<int64_t> parents;             // of its last tokens, which are drafts
  std::vector<std::vector<int64_t>> pages;  // of each group
};

struct StepWords {
  std::vector<int64_t> words;
  std::vector<double> numbers;
  std::vector<uint8_t> masks;
};

class StepWriter {
 public:
  std::vector<int64_t> closed;
  std::vector<std::vector<int64_t>> copies;
  std::vector<RowWords> rows;

  void open(int64_t slot, const Sampling& s) {
    for (int64_t word : {slot, int64_t(0), s.seed, s.top_k, s.repeat_last_n, s.min_tokens, s.logprobs, int64_t(s.bias_ids.size()),
                         int64_t(s.stop_ids.size()), int64_t(s.prompt.size()), int64_t(s.output.size())}) {
      opened_.push_back(word);
    }
    for (const auto* l : {&s.bias_ids, &s.stop_ids, &s.prompt, &s.output}) opened_.insert(opened_.end(), l->begin(), l->end());
    for (double number : {s.temperature, s.top_p, s.min_p, s.repetition, s.presence, s.frequency}) numbers_.push_back(number);
    numbers_.insert(numbers_.end(), s.bias.begin(), s.bias.end());
    ++opened_count_;
  }

  StepWords write() const {
    StepWords out;
    const auto add = [&](const std::vector<int64_t>& list) { out.words.insert(out.words.end(), list.begin(), list.end()); };
    add({int64_t(closed.size())});
    add(closed);
    add({opened_count_});
    add(opened_);
    add({int64_t(copies.size())});
    for (const auto& copy : copies) add(copy);
    add({int64_t(rows.size())});
    for (const RowWords& row : rows) {
      add({row.position, int64_t(row.tokens.size()), row.slot, row.mask, int64_t(row.parents.size())});
      add(row.tokens);
      add(row.parents);
      for (const auto& pages : row.pages) {
        add({int64_t(pages.size())});
        add(pages);
      }
    }
    out.numbers = numbers_;
    return out;
  }

 private:
  int64_t opened_count_ = 0;
  std::vector<int64_t> opened_;
  std::vector<double> numbers_;
};

constexpr int32_t kMostDrafts = 11;

struct Results {
  Results(int32_t rows, int32_t top)
      : max_rows(rows), max_draws(rows * (kMostDrafts + 1)), max_top(top), drawn(size_t(rows)) {
    for (auto* each : {&status, &token, &top_count}) each->resize(size_t(max_draws));
    logprob.resize(size_t(max_draws));
    top_ids.resize(size_t(max_draws) * size_t(top));
    top_logprobs.resize(top_ids.size());
  }

  int32_t run(cavectl_engine* engine, const StepWords& step) {
    error[0] = 0;
    return cavectl_step(engine, step.words.data(), int64_t(step.words.size()), step.numbers.data(), int64_t(step.numbers.size()),
                        step.masks.data(), int64_t(step.masks.size()), max_rows, drawn.data(), max_draws, status.data(),
                        token.data(), logprob.data(), max_top, top_count.data(), top_ids.data(), top_logprobs.data(), error);
  }

  int32_t max_rows, max_draws, max_top;
  std::vector<int32_t> drawn, status, token, top_count, top_ids;
  std::vector<double> logprob, top_logprobs;
  char error[CAVECTL_ERROR_BYTES] = {};
};

}  // namespace tiny
