// Sixteen lanes in plain C++, for any machine: the meaning of the vocabulary that kernels.inl is written in.
//
// V16 is 16 float32, V16i 16 int32. fma rounds once. max and min give their second operand where one is NaN. to_int rounds half to
// even. dot4 and dot8 give, for M tokens and lanes (rows) r, the sum over groups from .. to - 1 of a block of stored numbers times
// int8 activations; dot8's stored numbers count less kDot8Bias.
#pragma once

struct V16 {
  float v[16];
};
struct V16i {
  int32_t v[16];
};

constexpr int kTokenTile = 4;
constexpr int kScorePages = 1;
constexpr int value_chunks(int) { return 1; }
constexpr int kDot8Bias = 0;
constexpr size_t kLooseTokens = SIZE_MAX;  // from so many on, 4-bit weights are given a byte each first

template <typename F>
static inline V16 each(const F& f) {
  V16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}
template <typename F>
static inline V16i each_i(const F& f) {
  V16i out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}

static inline V16 load(const float* p) { return each([&](int i) { return p[i]; }); }
static inline void store(float* p, V16 x) { __builtin_memcpy(p, x.v, sizeof x.v); }
static inline V16 splat(float x) { return each([&](int) { return x; }); }
static inline V16 fma(V16 x, V16 y, V16 z) { return each([&](int i) { return fmaf(x.v[i], y.v[i], z.v[i]); }); }
static inline V16 mul(V16 x, V16 y) { return each([&](int i) { return x.v[i] * y.v[i]; }); }
static inline V16 add(V16 x, V16 y) { return each([&](int i) { return x.v[i] + y.v[i]; }); }
static inline V16 sub(V16 x, V16 y) { return each([&](int i) { return x.v[i] - y.v[i]; }); }
static inline V16 div(V16 x, V16 y) { return each([&](int i) { return x.v[i] / y.v[i]; }); }
static inline V16 max(V16 x, V16 y) { return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
static inline V16 min(V16 x, V16 y) { return each([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; }); }
static inline V16 absolute(V16 x) { return each([&](int i) { return fabsf(x.v[i]); }); }

static inline float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
static inline float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  if (exponent == 0) {
    const float size = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -size : size;
  }
  return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}
// Rounds half to even; too large becomes infinite.
static inline uint16_t to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float size = fabsf(x);
  if (x != x) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x1ff));
  if (size >= 65520.0f) return uint16_t(sign | 0x7c00);
  if (size < 6.103515625e-5f) return uint16_t(sign | uint16_t(nearbyintf(size * 16777216.0f)));
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
}
static inline V16 load_f16(const uint16_t* p) { return each([&](int i) { return from_half(p[i]); }); }
static inline void store_f16(uint16_t* p, V16 x) {
  for (int i = 0; i < 16; ++i) p[i] = to_half(x.v[i]);
}
static inline V16 load_bf16(const uint16_t* p) { return each([&](int i) { return float_of_bits(uint32_t(p[i]) << 16); }); }
static inline V16 load_i8(const int8_t* p) { return each([&](int i) { return float(p[i]); }); }
static inline V16 to_float(V16i x) { return each([&](int i) { return float(x.v[i]); }); }
static inline V16i to_int(V16 x) {
  return each_i([&](int i) { return fabsf(x.v[i]) < 2147483648.0f ? int32_t(nearbyintf(x.v[i])) : INT32_MIN; });
}
static inline V16i zero_i() { return each_i([](int) { return 0; }); }
static inline V16i add_i(V16i x, V16i y) { return each_i([&](int i) { return int32_t(uint32_t(x.v[i]) + uint32_t(y.v[i])); }); }
static inline V16i splat_i(int32_t x) { return each_i([&](int) { return x; }); }
static inline void store_i8(int8_t* p, V16i x) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
}
static inline V16 scale_by_power(V16 x, V16i n) {
  return each([&](int i) { return x.v[i] * float_of_bits((uint32_t(n.v[i]) + 127) << 23); });
}
static inline V16 zero_below(V16 x, V16 of, float bound) { return each([&](int i) { return of.v[i] < bound ? 0.0f : x.v[i]; }); }
static inline V16 keep_lanes(V16 x, int low, int high, float other) {
  return each([&](int i) { return i >= low && i < high ? x.v[i] : other; });
}
static inline float reduce_add(V16 x) {
  for (int step = 8; step; step /= 2) {
    for (int i = 0; i < step; ++i) x.v[i] += x.v[i + step];
  }
  return x.v[0];
}
static inline float reduce_max(V16 x) {
  for (int step = 8; step; step /= 2) {
    for (int i = 0; i < step; ++i) x.v[i] = x.v[i] > x.v[i + step] ? x.v[i] : x.v[i + step];
  }
  return x.v[0];
}
static inline int32_t reduce_add_i(V16i x) {
  int32_t sum = 0;
  for (int32_t value : x.v) sum += value;
  return sum;
}

template <int M>
static inline void dot4(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  for (int m = 0; m < M; ++m) {
    out[m] = zero_i();
    for (int j = from; j < to; ++j) {
      for (int i = 0; i < 64; ++i) {
        const uint8_t byte = block[64 * j + i];
        out[m].v[i / 4] += (byte & 15) * x[m][8 * j + i % 4] + (byte >> 4) * x[m][8 * j + 4 + i % 4];
      }
    }
  }
}

template <int M>
static inline void dot8(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  for (int m = 0; m < M; ++m) {
    out[m] = zero_i();
    for (int j = from; j < to; ++j) {
      for (int i = 0; i < 64; ++i) out[m].v[i / 4] += block[64 * j + i] * x[m][4 * j + i % 4];
    }
  }
}

// A panel's rows in parts whose sums fit the registers: here all 16 lanes are one.
using Part = V16;
using PartI = V16i;
constexpr int kParts = 1;
static inline Part load_part(const float* p) { return load(p); }
static inline Part splat_part(float x) { return splat(x); }
static inline PartI splat_part_i(int32_t x) { return splat_i(x); }
static inline void set_part(V16& x, int, Part y) { x = y; }

// As dot4, over stored numbers of at most 15 that lie a byte each, in dot8's layout.
template <int M>
static inline void dot_small(const uint8_t* block, int, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  dot8<M>(block, from, to, x, out);
}
