// Sixteen lanes on AArch64 with dot products: four registers of four. The vocabulary of kernels.inl; see simd_scalar.h for its meaning.
#pragma once
#include <arm_neon.h>

struct V16 {
  float32x4_t a, b, c, d;
};
struct V16i {
  int32x4_t a, b, c, d;
};

constexpr int kTokenTile = 4;  // 16 sums, the weights of a group and their activations are what 32 registers hold
constexpr int kScorePages = 1;
constexpr int value_chunks(int) { return 1; }
constexpr size_t kLooseTokens = SIZE_MAX;  // never: splitting nibbles is cheap beside four dot products
constexpr int kDot8Bias = 128;  // dot8 gives the sum of (w - 128) x

template <typename F>
static inline V16 each(V16 x, const F& f) {
  return {f(x.a), f(x.b), f(x.c), f(x.d)};
}
template <typename F>
static inline V16 each(V16 x, V16 y, const F& f) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}

static inline V16 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
static inline void store(float* p, V16 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
static inline V16 splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline V16 fma(V16 x, V16 y, V16 z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
static inline V16 mul(V16 x, V16 y) {
  return each(x, y, [](float32x4_t s, float32x4_t t) { return vmulq_f32(s, t); });
}
static inline V16 add(V16 x, V16 y) {
  return each(x, y, [](float32x4_t s, float32x4_t t) { return vaddq_f32(s, t); });
}
static inline V16 sub(V16 x, V16 y) {
  return each(x, y, [](float32x4_t s, float32x4_t t) { return vsubq_f32(s, t); });
}
static inline V16 div(V16 x, V16 y) {
  return each(x, y, [](float32x4_t s, float32x4_t t) { return vdivq_f32(s, t); });
}
// The instructions for max and min give NaN where either operand is: a comparison and a choice give the second operand.
static inline float32x4_t max_4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
static inline float32x4_t min_4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
static inline V16 max(V16 x, V16 y) { return each(x, y, max_4); }
static inline V16 min(V16 x, V16 y) { return each(x, y, min_4); }
static inline V16 absolute(V16 x) {
  return each(x, [](float32x4_t s) { return vabsq_f32(s); });
}

static inline float32x4_t half_4(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
static inline V16 load_f16(const uint16_t* p) {
  const uint16x8_t x = vld1q_u16(p), y = vld1q_u16(p + 8);
  return {half_4(vget_low_u16(x)), half_4(vget_high_u16(x)), half_4(vget_low_u16(y)), half_4(vget_high_u16(y))};
}
static inline void store_f16(uint16_t* p, V16 x) {
  const auto halves = [](float32x4_t s) { return vreinterpret_u16_f16(vcvt_f16_f32(s)); };
  vst1q_u16(p, vcombine_u16(halves(x.a), halves(x.b)));
  vst1q_u16(p + 8, vcombine_u16(halves(x.c), halves(x.d)));
}
static inline float32x4_t bf16_4(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
static inline V16 load_bf16(const uint16_t* p) {
  const uint16x8_t x = vld1q_u16(p), y = vld1q_u16(p + 8);
  return {bf16_4(vget_low_u16(x)), bf16_4(vget_high_u16(x)), bf16_4(vget_low_u16(y)), bf16_4(vget_high_u16(y))};
}
static inline V16 to_float(V16i x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
static inline V16 load_i8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return to_float({vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                   vmovl_s16(vget_high_s16(high))});
}
// The conversion saturates and makes 0 of NaN: what does not fit is INT32_MIN here, as elsewhere.
static inline int32x4_t int_4(float32x4_t x) {
  return vbslq_s32(vcaltq_f32(x, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
static inline V16i to_int(V16 x) { return {int_4(x.a), int_4(x.b), int_4(x.c), int_4(x.d)}; }
static inline V16i splat_i(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
static inline V16i zero_i() { return splat_i(0); }
static inline V16i add_i(V16i x, V16i y) {
  return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)};
}
static inline void store_i8(int8_t* p, V16i x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)), high = vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
static inline float32x4_t power_4(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
static inline V16 scale_by_power(V16 x, V16i n) { return mul(x, {power_4(n.a), power_4(n.b), power_4(n.c), power_4(n.d)}); }
static inline V16 zero_below(V16 x, V16 of, float bound) {
  return each(x, of, [bound](float32x4_t s, float32x4_t t) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(s), vcltq_f32(t, vdupq_n_f32(bound))));
  });
}
static inline float32x4_t keep_4(float32x4_t x, int at, int low, int high, float other) {
  constexpr int32_t kLanes[4] = {0, 1, 2, 3};
  const int32x4_t lane = vaddq_s32(vld1q_s32(kLanes), vdupq_n_s32(at));
  const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(low)), vcltq_s32(lane, vdupq_n_s32(high)));
  return vbslq_f32(inside, x, vdupq_n_f32(other));
}
static inline V16 keep_lanes(V16 x, int low, int high, float other) {
  return {keep_4(x.a, 0, low, high, other), keep_4(x.b, 4, low, high, other), keep_4(x.c, 8, low, high, other),
          keep_4(x.d, 12, low, high, other)};
}

// Trees: lane i with lane i + 8, then + 4, + 2, + 1.
static inline float reduce_add(V16 x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float reduce_max(V16 x) {
  const float32x4_t four = max_4(max_4(x.a, x.c), max_4(x.b, x.d));
  const float32x2_t low = vget_low_f32(four), high = vget_high_f32(four), two = vbsl_f32(vcgt_f32(low, high), low, high);
  const float first = vget_lane_f32(two, 0), second = vget_lane_f32(two, 1);
  return first > second ? first : second;
}
static inline int32_t reduce_add_i(V16i x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }

static inline int8x16_t four_of(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
// out += the products of four rows' weights each: w holds four columns of rows 0-3, 4-7, 8-11 and 12-15.
static inline void accumulate(V16i& out, const int8x16_t (&w)[4], int8x16_t x) {
  out.a = vdotq_s32(out.a, w[0], x);
  out.b = vdotq_s32(out.b, w[1], x);
  out.c = vdotq_s32(out.c, w[2], x);
  out.d = vdotq_s32(out.d, w[3], x);
}

template <int M>
static inline void dot4(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  for (int m = 0; m < M; ++m) out[m] = zero_i();
  for (int j = from; j < to; ++j) {
    int8x16_t first[4], second[4];
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t w = vld1q_u8(block + 64 * j + 16 * i);
      first[i] = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15)));
      second[i] = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
    }
    for (int m = 0; m < M; ++m) {
      accumulate(out[m], first, four_of(x[m] + 8 * j));
      accumulate(out[m], second, four_of(x[m] + 8 * j + 4));
    }
  }
}

template <int M>
static inline void dot8(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  for (int m = 0; m < M; ++m) out[m] = zero_i();
  for (int j = from; j < to; ++j) {
    int8x16_t w[4];
    for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(block + 64 * j + 16 * i), vdupq_n_u8(0x80)));
    for (int m = 0; m < M; ++m) accumulate(out[m], w, four_of(x[m] + 4 * j));
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
  for (int m = 0; m < M; ++m) out[m] = zero_i();
  for (int j = from; j < to; ++j) {
    int8x16_t w[4];
    for (int i = 0; i < 4; ++i) w[i] = vreinterpretq_s8_u8(vld1q_u8(block + 64 * j + 16 * i));
    for (int m = 0; m < M; ++m) accumulate(out[m], w, four_of(x[m] + 4 * j));
  }
}
