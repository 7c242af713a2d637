// What compare_isas.cpp feeds the kernels: random numbers, matrices, inputs and caches, of odd shapes and with odd values among them.
//
// Invariant: all comes from one seed, so that a difference can be seen again.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"

namespace compare {

using cavectl::Matrix;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  size_t below(size_t n) { return (bits() >> 32) % n; }
  bool one_in(size_t n) { return below(n) == 0; }
  float plain() { return float(int64_t(bits()) >> 40) * 0x1p-22f; }  // -2 .. 2

  // Mostly plain; else NaN, infinities, zeros, numbers of any size, and what rounds in the middle.
  float wild() {
    if (!one_in(40)) return plain();
    const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-31f, 1e-40f, 65519.9f, 65520.0f, -1e30f, 2147483648.0f, 0.5f, 3e38f};
    constexpr size_t kOdd = sizeof odd / sizeof *odd;
    const size_t choice = below(kOdd + 4);
    return choice < kOdd ? odd[choice] : any();
  }
  float any() {
    const uint32_t word = uint32_t(bits() >> 32);
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
  }
  float middle(bool largest) { return largest ? 127.0f : float(below(254)) - 126.5f; }
  // Of 2^-15 .. 2 or none of them normal, and now and then NaN or infinite.
  uint16_t half(size_t wild_one_in) {
    const uint16_t word = uint16_t(bits() >> 32);
    return one_in(wild_one_in) ? word | 0x7c00 : uint16_t((word & 0x83ff) | (below(17) << 10));
  }

 private:
  uint64_t state_;
};

constexpr size_t kNever = size_t(1) << 31;

inline std::vector<float> plain_values(Random& random, size_t n) {
  std::vector<float> values(n);
  for (float& value : values) value = random.plain();
  return values;
}

inline std::vector<float> wild_values(Random& random, size_t n) {
  std::vector<float> values(n);
  for (float& value : values) value = random.wild();
  return values;
}

// --- a packed matrix ----------------------------------------------------------------------------------------------------------------

struct Weights {
  std::vector<uint8_t> bytes;
  std::vector<float> bias;
  Matrix matrix;
};

template <typename T>
void put(std::vector<uint8_t>& bytes, size_t item, T value) {
  memcpy(bytes.data() + item * sizeof value, &value, sizeof value);
}

inline void fill_floats(Random& random, Weights& w) {
  const size_t items = w.bytes.size() * 8 / size_t(cavectl::kKindInfo[w.matrix.kind].bits);
  for (size_t i = 0; i < items; ++i) {
    const float value = random.one_in(200) ? random.wild() : random.plain();
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if (w.matrix.kind == cavectl::kF32) put(w.bytes, i, word);
    if (w.matrix.kind == cavectl::kF16) put(w.bytes, i, random.half(500));
    if (w.matrix.kind == cavectl::kBF16) put(w.bytes, i, uint16_t(word >> 16));
  }
}

// Any stored numbers, the ends of their range often; scales and minimums that now and then are NaN or infinite.
inline void fill_blocks(Random& random, Weights& w) {
  const size_t block = cavectl::block_bytes(w.matrix.kind), numbers = size_t(64) * cavectl::kKindInfo[w.matrix.kind].bits;
  const bool ends = random.one_in(3);
  for (uint8_t& byte : w.bytes) byte = ends ? (random.one_in(2) ? 0xff : 0) : uint8_t(random.bits() >> 32);
  for (size_t at = 0; at < w.bytes.size(); at += block) {
    for (size_t i = (at + numbers) / 2; i < (at + block) / 2; ++i) put(w.bytes, i, random.half(1000));
  }
}

inline Weights random_weights(Random& random, uint32_t kind, size_t rows, size_t columns) {
  Weights w;
  w.matrix.kind = kind;
  w.matrix.rows = rows;
  w.matrix.columns = columns;
  w.matrix.panels = cavectl::panels(rows);
  w.matrix.panel_bytes = cavectl::panel_bytes(kind, columns);
  w.matrix.scale = random.one_in(2) ? 1.0f : 0x1p-9f;
  w.bytes.resize(w.matrix.panels * w.matrix.panel_bytes);
  if (cavectl::is_integer(kind)) {
    fill_blocks(random, w);
  } else {
    fill_floats(random, w);
  }
  w.matrix.data = w.bytes.data();
  if (random.one_in(2)) {
    w.bias = wild_values(random, w.matrix.panels * cavectl::kPanelRows);
    w.matrix.bias = w.bias.data();
  }
  return w;
}

// --- inputs -------------------------------------------------------------------------------------------------------------------------

struct Inputs {
  std::vector<float> f, d, s, s16;
  std::vector<int8_t> q;
  std::vector<int32_t> i, i16;
  std::vector<uint8_t> loose;
  size_t tokens, columns, stride, blocks;

  // What it looks like from token t on.
  cavectl::Activations from(size_t t) {
    cavectl::Activations x;
    x.columns = columns;
    x.stride = stride;
    x.blocks = blocks;
    x.f = f.data() + t * stride;
    x.q = q.data() + t * blocks * 32;
    x.d = d.data() + t * blocks;
    x.s = s.data() + t * blocks;
    x.s16 = s16.data() + t * 2 * blocks;
    x.i = i.data() + t * blocks;
    x.i16 = i16.data() + t * 2 * blocks;
    x.loose = loose.data();
    return x;
  }
};

// Floats only; the rest is for `quantise`. Half of the tokens have odd values, some a block of zeros, some one that rounds in the middle:
// its largest is 127, the others whole numbers and a half.
inline Inputs random_inputs(Random& random, size_t tokens, size_t columns) {
  Inputs x;
  x.tokens = tokens;
  x.columns = columns;
  x.stride = cavectl::padded(columns);
  x.blocks = (x.stride + 31) / 32;
  x.f.resize(tokens * x.stride + 16);  // quantise reads whole blocks
  for (size_t t = 0; t < tokens; ++t) {
    const bool wild = random.one_in(2);
    const size_t zeros = random.below(4 * x.blocks), middle = random.below(2 * x.blocks);
    for (size_t c = 0; c < columns; ++c) {
      const float value = wild ? random.wild() : random.plain();
      x.f[t * x.stride + c] = c / 32 == zeros ? 0.0f : c / 32 == middle ? random.middle(c % 32 == 0) : value;
    }
  }
  x.loose.resize(2 * cavectl::loose_room(columns) + 1);
  x.q.resize(tokens * x.blocks * 32);
  x.d.resize(tokens * x.blocks);
  x.s = x.d;
  x.i.resize(tokens * x.blocks);
  x.s16.resize(2 * tokens * x.blocks);
  x.i16.resize(2 * tokens * x.blocks);
  return x;
}

// --- a cache ------------------------------------------------------------------------------------------------------------------------

struct Cache {
  std::vector<uint8_t> k, v, k_scale, v_scale;
  uint32_t type;
  size_t kv_heads, head_dim, pages;

  cavectl::KvPlane plane() {
    return {type, k.data(), v.data(), k_scale.data(), v_scale.data(), kv_heads, head_dim, pages};
  }
  size_t item_bytes() const { return type == cavectl::kKvF32 ? 4 : type == cavectl::kKvF16 ? 2 : 1; }
};

inline void fill_cache(Random& random, Cache& cache, std::vector<uint8_t>& bytes, size_t wild_one_in) {
  for (size_t i = 0; i < bytes.size() / cache.item_bytes(); ++i) {
    if (cache.type == cavectl::kKvF32) put(bytes, i, random.one_in(wild_one_in) ? random.wild() : random.plain());
    if (cache.type == cavectl::kKvF16) put(bytes, i, random.half(wild_one_in));
    if (cache.type == cavectl::kKvInt8) bytes[i] = uint8_t(random.bits() >> 32);
  }
}

inline Cache random_cache(Random& random, uint32_t type, size_t kv_heads, size_t head_dim, size_t pages) {
  Cache cache{{}, {}, {}, {}, type, kv_heads, head_dim, pages};
  const size_t tokens = pages * kv_heads * cavectl::kPageTokens, wild = random.one_in(2) ? 2000 : kNever;
  cache.k.resize(tokens * head_dim * cache.item_bytes());
  cache.v.resize(tokens * cavectl::padded(head_dim) * cache.item_bytes());
  cache.k_scale.resize(tokens * 2);
  cache.v_scale.resize(tokens * 2);
  fill_cache(random, cache, cache.k, wild);
  fill_cache(random, cache, cache.v, wild);
  for (size_t i = 0; i < tokens; ++i) {
    put(cache.k_scale, i, random.half(wild));
    put(cache.v_scale, i, random.half(wild));
  }
  return cache;
}

}  // namespace compare
