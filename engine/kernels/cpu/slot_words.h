// A sampling slot as words and numbers (laid out in cavectl.h), read into a Slot.
//
// Owned here: that layout and what values a slot may have, the ranges of engine/runtime/sampler.py check(). Not here: how many slots
// there are. Invariant: what parse_slot accepts, sample() takes for any logits of this vocabulary.
#pragma once
#include <cstdint>

#include "sampler.h"

namespace cavectl {

// Reads one slot from the front of both buffers. Returns null and sets all the results, or returns what is wrong (a static text).
// `out.open` stays false: opening it is the caller's. Throws std::bad_alloc.
const char* parse_slot(const int64_t* words, int64_t word_count, const double* numbers, int64_t number_count, int32_t vocab, Slot& out,
                       int32_t& slot_index, int64_t& used_words, int64_t& used_numbers);

}  // namespace cavectl
