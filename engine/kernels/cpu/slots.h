// One position's keys and values, moved between pages and planes.
//
// Owned here: where a slot of a page lies in a plane's memory. Not here: how values are stored (attention.inl).
#pragma once
#include <cstring>

#include "kernels.h"

namespace cavectl {

inline constexpr size_t kKvBytes[kKvTypes] = {4, 2, 1};

inline size_t key_head_bytes(const KvPlane& p) { return p.head_dim * kPageTokens * kKvBytes[p.type]; }
inline size_t value_head_bytes(const KvPlane& p) { return padded(p.head_dim) * kPageTokens * kKvBytes[p.type]; }

struct SlotPlace {
  size_t page, slot;
};

// A page of one head, all of it.
inline void copy_head(const KvPlane& from, size_t from_head, size_t from_page, const KvPlane& to, size_t to_head, size_t to_page) {
  const size_t source = from_page * from.kv_heads + from_head, target = to_page * to.kv_heads + to_head;
  memcpy(to.k + target * key_head_bytes(to), from.k + source * key_head_bytes(from), key_head_bytes(from));
  memcpy(to.v + target * value_head_bytes(to), from.v + source * value_head_bytes(from), value_head_bytes(from));
  if (from.type != kKvInt8) return;
  const size_t scales = kPageTokens * sizeof(uint16_t);
  memcpy(to.k_scale + target * scales, from.k_scale + source * scales, scales);
  memcpy(to.v_scale + target * scales, from.v_scale + source * scales, scales);
}

// One slot of one head.
inline void copy_slot(const KvPlane& from, size_t from_head, SlotPlace at, const KvPlane& to, size_t to_head, SlotPlace into) {
  const size_t item = kKvBytes[from.type], source = at.page * from.kv_heads + from_head, target = into.page * to.kv_heads + to_head;
  const uint8_t* keys = from.k + source * key_head_bytes(from) + at.slot * item;
  uint8_t* new_keys = to.k + target * key_head_bytes(to) + into.slot * item;
  for (size_t i = 0; i < from.head_dim; ++i) memcpy(new_keys + i * kPageTokens * item, keys + i * kPageTokens * item, item);
  const size_t width = padded(from.head_dim) * item;
  memcpy(to.v + target * value_head_bytes(to) + into.slot * width, from.v + source * value_head_bytes(from) + at.slot * width, width);
  if (from.type != kKvInt8) return;
  const auto scale = [](uint8_t* scales, size_t page, size_t slot) { return scales + (page * kPageTokens + slot) * sizeof(uint16_t); };
  memcpy(scale(to.k_scale, target, into.slot), scale(from.k_scale, source, at.slot), sizeof(uint16_t));
  memcpy(scale(to.v_scale, target, into.slot), scale(from.v_scale, source, at.slot), sizeof(uint16_t));
}

}  // namespace cavectl
