// The sampler alone, behind the C ABI: for tests, and for whoever has logits and no engine.
#include <algorithm>
#include <new>

#include "abi_error.h"
#include "slot_words.h"

int32_t cavectl_sample(const float* logits, int32_t vocab, const int64_t* words, int64_t word_count, const double* numbers,
                       int64_t number_count, const uint8_t* mask, int32_t* status, int32_t* token, double* logprob,
                       int32_t max_top, int32_t* top_count, int32_t* top_ids, double* top_logprobs, char* error) {
  try {
    if (vocab < 1) return cavectl::fail(error, CAVECTL_INVALID, "the vocabulary is empty");
    cavectl::Slot slot;
    int32_t index = 0;
    int64_t used_words = 0, used_numbers = 0;
    const char* wrong = cavectl::parse_slot(words, word_count, numbers, number_count, vocab, slot, index, used_words, used_numbers);
    if (wrong) return cavectl::fail(error, CAVECTL_INVALID, wrong);
    cavectl::SampleScratch scratch;
    cavectl::Sample found;
    cavectl::sample(logits, vocab, slot, mask, scratch, found);
    *status = found.status;
    *token = found.token;
    *logprob = found.logprob;
    *top_count = int32_t(std::min(found.top.size(), size_t(std::max(max_top, 0))));
    for (int32_t i = 0; i < *top_count; ++i) {
      top_ids[i] = found.top[size_t(i)].first;
      top_logprobs[i] = found.top[size_t(i)].second;
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return cavectl::fail(error, CAVECTL_MEMORY, "the system gave no memory");
  }
}
