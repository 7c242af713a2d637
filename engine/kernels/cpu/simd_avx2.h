// Sixteen lanes on AVX2 with FMA and F16C: two registers of eight. The vocabulary of kernels.inl; see simd_scalar.h for its meaning.
#pragma once
#include <immintrin.h>

struct V16 {
  __m256 a, b;
};
struct V16i {
  __m256i a, b;
};

// A panel's rows in parts whose sums fit the registers: lanes, and how many parts there are.
using Part = __m256;
using PartI = __m256i;
constexpr int kParts = 2;
static inline Part load_part(const float* p) { return _mm256_loadu_ps(p); }
static inline Part splat_part(float x) { return _mm256_set1_ps(x); }
static inline PartI splat_part_i(int32_t x) { return _mm256_set1_epi32(x); }
static inline PartI add_i(PartI x, PartI y) { return _mm256_add_epi32(x, y); }
static inline Part to_float(PartI x) { return _mm256_cvtepi32_ps(x); }
static inline Part mul(Part x, Part y) { return _mm256_mul_ps(x, y); }
static inline Part fma(Part x, Part y, Part z) { return _mm256_fmadd_ps(x, y, z); }
static inline void set_part(V16& x, int part, Part y) { (part ? x.b : x.a) = y; }

constexpr int kTokenTile = 4;   // tokens that share one unpacking of a panel
constexpr int kScorePages = 1;  // pages of keys, and chunks of values, taken together: what the registers hold
constexpr int value_chunks(int heads) { return heads == 1 ? 4 : heads <= 3 ? 2 : 1; }
constexpr int kDot8Bias = 128;  // dot8 gives the sum of (w - 128) x
constexpr size_t kLooseTokens = 16;  // from so many on, 4-bit weights are given a byte each first

static inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V16 absolute(V16 x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
static inline V16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline void store_f16(uint16_t* p, V16 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
static inline __m256 bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline V16 load_bf16(const uint16_t* p) { return {bf16_8(p), bf16_8(p + 8)}; }
static inline V16 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline V16 to_float(V16i x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline V16i to_int(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline V16i zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline V16i add_i(V16i x, V16i y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline V16i splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline void store_i8(int8_t* p, V16i x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(bytes));
}
// x * 2^n for integral n of -126 .. 127
static inline V16 scale_by_power(V16 x, V16i n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_mul_ps(x.a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23))),
          _mm256_mul_ps(x.b, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23)))};
}
// x where x is not below `bound` (NaN stays), else 0; `of` is what is compared
static inline V16 zero_below(V16 x, V16 of, float bound) {
  const __m256 least = _mm256_set1_ps(bound);
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(of.a, least, _CMP_NLT_UQ)), _mm256_and_ps(x.b, _mm256_cmp_ps(of.b, least, _CMP_NLT_UQ))};
}
static inline V16 keep_lanes(V16 x, int low, int high, float other) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  const __m256i from = _mm256_set1_epi32(low - 1), to = _mm256_set1_epi32(high);
  const __m256 instead = _mm256_set1_ps(other);
  const __m256i in_a = _mm256_and_si256(_mm256_cmpgt_epi32(first, from), _mm256_cmpgt_epi32(to, first));
  const __m256i in_b = _mm256_and_si256(_mm256_cmpgt_epi32(second, from), _mm256_cmpgt_epi32(to, second));
  return {_mm256_blendv_ps(instead, x.a, _mm256_castsi256_ps(in_a)), _mm256_blendv_ps(instead, x.b, _mm256_castsi256_ps(in_b))};
}
// Trees: lane i with lane i + 8, then + 4, + 2, + 1.
static inline float reduce_add(V16 x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float reduce_max(V16 x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline int32_t reduce_add_i(V16i x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

static inline __m256i four_of(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// Groups from .. to - 1 of a 4-bit block (8 columns each) for M tokens; into lanes 0-7 (half 0) or 8-15. A pair of products is at
// most 2 * 15 * 127, and eight of them stay below 2^15.
template <int M>
static inline void dot4_half(const uint8_t* block, int half, int from, int to, const int8_t* const* x, __m256i (&sums)[M]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i pairs[M];
  for (int m = 0; m < M; ++m) pairs[m] = _mm256_setzero_si256();
  for (int j = from; j < to; ++j) {
    const __m256i w = _mm256_loadu_si256((const __m256i*)(block + 64 * j + 32 * half));
    const __m256i first = _mm256_and_si256(w, low), second = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);
    for (int m = 0; m < M; ++m) {
      const __m256i p = _mm256_maddubs_epi16(first, four_of(x[m] + 8 * j));
      const __m256i q = _mm256_maddubs_epi16(second, four_of(x[m] + 8 * j + 4));
      pairs[m] = _mm256_add_epi16(pairs[m], _mm256_add_epi16(p, q));
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int m = 0; m < M; ++m) sums[m] = _mm256_madd_epi16(pairs[m], ones);
}

template <int M>
static inline void dot4(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  __m256i sums[M];
  dot4_half<M>(block, 0, from, to, x, sums);
  for (int m = 0; m < M; ++m) out[m].a = sums[m];
  dot4_half<M>(block, 1, from, to, x, sums);
  for (int m = 0; m < M; ++m) out[m].b = sums[m];
}

// |w| <= 128 and |x| <= 127, so that a pair of products is at most 32512.
template <int M>
static inline void dot8_half(const uint8_t* block, int half, int from, int to, const int8_t* const* x, __m256i (&sums)[M]) {
  const __m256i flip = _mm256_set1_epi8(char(0x80)), ones = _mm256_set1_epi16(1);
  for (int m = 0; m < M; ++m) sums[m] = _mm256_setzero_si256();
  for (int j = from; j < to; ++j) {
    const __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(block + 64 * j + 32 * half)), flip);
    const __m256i size = _mm256_abs_epi8(w);
    for (int m = 0; m < M; ++m) {
      const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four_of(x[m] + 4 * j), w));
      sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs, ones));
    }
  }
}

template <int M>
static inline void dot8(const uint8_t* block, int from, int to, const int8_t* const* x, V16i (&out)[M]) {
  __m256i sums[M];
  dot8_half<M>(block, 0, from, to, x, sums);
  for (int m = 0; m < M; ++m) out[m].a = sums[m];
  dot8_half<M>(block, 1, from, to, x, sums);
  for (int m = 0; m < M; ++m) out[m].b = sums[m];
}

// Lanes 8 * part .. 8 * part + 7 of dot4, over stored numbers of at most 15 that lie a byte each, in dot8's layout.
template <int M>
static inline void dot_small(const uint8_t* block, int part, int from, int to, const int8_t* const* x, __m256i (&out)[M]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i pairs[M];
  for (int m = 0; m < M; ++m) pairs[m] = _mm256_setzero_si256();
  for (int j = from; j < to; ++j) {
    const __m256i w = _mm256_loadu_si256((const __m256i*)(block + 64 * j + 32 * part));
    for (int m = 0; m < M; ++m) pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(w, four_of(x[m] + 4 * j)));
  }
  for (int m = 0; m < M; ++m) out[m] = _mm256_madd_epi16(pairs[m], ones);
}
