// Sixteen lanes on AVX-512 with VNNI: one register. The vocabulary of kernels.inl; see simd_scalar.h for its meaning.
#pragma once
#include <immintrin.h>

struct V16 {
  __m512 v;
};
struct V16i {
  __m512i v;
};

constexpr int kTokenTile = 8;
constexpr int kScorePages = 4;
constexpr int value_chunks(int) { return 4; }
constexpr int kDot8Bias = 0;  // dot8 gives the sum of w x
constexpr size_t kLooseTokens = SIZE_MAX;  // from so many on, 4-bit weights are given a byte each first

static inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, V16 x) { _mm512_storeu_ps(p, x.v); }
static inline V16 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 fma(V16 x, V16 y, V16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
static inline V16 mul(V16 x, V16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
static inline V16 add(V16 x, V16 y) { return {_mm512_add_ps(x.v, y.v)}; }
static inline V16 sub(V16 x, V16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
static inline V16 div(V16 x, V16 y) { return {_mm512_div_ps(x.v, y.v)}; }
static inline V16 max(V16 x, V16 y) { return {_mm512_max_ps(x.v, y.v)}; }
static inline V16 min(V16 x, V16 y) { return {_mm512_min_ps(x.v, y.v)}; }
static inline V16 absolute(V16 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)))};
}
static inline V16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void store_f16(uint16_t* p, V16 x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline V16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline V16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static inline V16 to_float(V16i x) { return {_mm512_cvtepi32_ps(x.v)}; }
static inline V16i to_int(V16 x) { return {_mm512_cvtps_epi32(x.v)}; }
static inline V16i zero_i() { return {_mm512_setzero_si512()}; }
static inline V16i add_i(V16i x, V16i y) { return {_mm512_add_epi32(x.v, y.v)}; }
static inline V16i splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline void store_i8(int8_t* p, V16i x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x.v)); }
static inline V16 scale_by_power(V16 x, V16i n) {
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(power))};
}
static inline V16 zero_below(V16 x, V16 of, float bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(of.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), x.v)};
}
static inline V16 keep_lanes(V16 x, int low, int high, float other) {
  const unsigned mask = ((1u << high) - 1u) & ~((1u << low) - 1u);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), __mmask16(mask), x.v)};
}
static inline float reduce_add(V16 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float reduce_max(V16 x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline int32_t reduce_add_i(V16i x) { return _mm512_reduce_add_epi32(x.v); }

static inline __m512i four_of(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

template <int M>
static inline void dot4(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int m = 0; m < M; ++m) out[m].v = _mm512_setzero_si512();
  for (int j = from; j < to; ++j) {
    const __m512i w = _mm512_loadu_si512(block + 64 * j);
    const __m512i first = _mm512_and_si512(w, low), second = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
    for (int m = 0; m < M; ++m) {
      out[m].v = _mm512_dpbusd_epi32(out[m].v, first, four_of(x[m] + 8 * j));
      out[m].v = _mm512_dpbusd_epi32(out[m].v, second, four_of(x[m] + 8 * j + 4));
    }
  }
}

template <int M>
static inline void dot8(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  for (int m = 0; m < M; ++m) out[m].v = _mm512_setzero_si512();
  for (int j = from; j < to; ++j) {
    const __m512i w = _mm512_loadu_si512(block + 64 * j);
    for (int m = 0; m < M; ++m) out[m].v = _mm512_dpbusd_epi32(out[m].v, w, four_of(x[m] + 4 * j));
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
