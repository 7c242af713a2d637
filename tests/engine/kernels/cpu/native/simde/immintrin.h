// Stands in for the compiler's <immintrin.h> (this folder goes first on the include path), so that the AVX2 and AVX-512 kernels run on
// a machine that has neither: SIMDe's portable versions, and those written here.
//
// Written here: what SIMDe 0.7.4 lacks for 512 bits, and what it does not do to the bit: it fuses no product with a sum, and its
// conversions to int32 and float16 leave NaN and large values to chance. Each is one lane's formula, over all lanes.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wignored-attributes"  // of vector types, as template arguments: may_alias, which memcpy does not need
#endif
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <math.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <stdint.h>
#include <string.h>

using __mmask16 = simde__mmask16;

namespace emulated {

template <typename T, typename Vector>
struct Lanes {
  static constexpr int kCount = sizeof(Vector) / sizeof(T);
  T v[kCount];
  explicit Lanes(Vector from) { memcpy(v, &from, sizeof v); }
};

// f of every lane of `x`, taken as From, in a vector of To.
template <typename ToVector, typename To, typename From, typename FromVector, typename F>
static inline ToVector map(FromVector x, const F& f) {
  const Lanes<From, FromVector> from(x);
  constexpr int kCount = sizeof(ToVector) / sizeof(To);
  static_assert(kCount <= Lanes<From, FromVector>::kCount);
  To to[kCount];
  for (int i = 0; i < kCount; ++i) to[i] = f(from.v[i]);
  ToVector out;
  memcpy(&out, to, sizeof out);
  return out;
}

template <typename Vector>
static inline Vector fused(Vector x, Vector y, Vector z) {
  const Lanes<float, Vector> a(x), b(y);
  Lanes<float, Vector> c(z);
  for (int i = 0; i < c.kCount; ++i) c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
  memcpy(&z, c.v, sizeof z);
  return z;
}

static inline int32_t nearest(float x) { return fabsf(x) < 2147483648.0f ? int32_t(nearbyintf(x)) : INT32_MIN; }

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return float_of(uint32_t(half & 0x8000) << 16 | 0x7f800000u | (fraction ? 0x400000u : 0u) | uint32_t(fraction) << 13);
  const double size = ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
  return float(half & 0x8000 ? -size : size);
}

// Whole units of the last place, rounded half to even; a unit is 2^-24 or more.
static inline uint16_t to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (x != x) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x1ff));
  if (fabsf(x) > 70000.0f) return uint16_t(sign | 0x7c00);
  int exponent = -99;
  if (x != 0) frexp(double(x), &exponent);
  const int unit = exponent - 11 > -24 ? exponent - 11 : -24;
  const int stored = int(nearbyint(ldexp(fabs(double(x)), -unit))) + (unit + 24) * 1024;
  return uint16_t(sign | (stored < 0x7c00 ? stored : 0x7c00));
}

}  // namespace emulated

#undef _mm256_fmadd_ps
#undef _mm512_fmadd_ps
#define _mm256_fmadd_ps(x, y, z) emulated::fused<__m256>(x, y, z)
#define _mm512_fmadd_ps(x, y, z) emulated::fused<__m512>(x, y, z)

#undef _mm256_cvtps_epi32
#define _mm256_cvtps_epi32(x) emulated::map<__m256i, int32_t, float, __m256>(x, emulated::nearest)
#define _mm512_cvtps_epi32(x) emulated::map<__m512i, int32_t, float, __m512>(x, emulated::nearest)

#undef _mm256_cvtph_ps
#undef _mm256_cvtps_ph
#define _mm256_cvtph_ps(x) emulated::map<__m256, float, uint16_t, __m128i>(x, emulated::from_half)
#define _mm256_cvtps_ph(x, rounding) emulated::map<__m128i, uint16_t, float, __m256>(x, emulated::to_half)
#define _mm512_cvtph_ps(x) emulated::map<__m512, float, uint16_t, __m256i>(x, emulated::from_half)
#define _mm512_cvtps_ph(x, rounding) emulated::map<__m256i, uint16_t, float, __m512>(x, emulated::to_half)

#define _mm512_cvtepi32_ps(x) emulated::map<__m512, float, int32_t, __m512i>(x, [](int32_t lane) { return float(lane); })
#define _mm512_cvtepi8_epi32(x) emulated::map<__m512i, int32_t, int8_t, __m128i>(x, [](int8_t lane) { return int32_t(lane); })
#define _mm512_cvtepu16_epi32(x) emulated::map<__m512i, uint32_t, uint16_t, __m256i>(x, [](uint16_t lane) { return uint32_t(lane); })

static inline __m256 _mm512_extractf32x8_ps(__m512 x, int half) {
  __m256 out;
  memcpy(&out, reinterpret_cast<const char*>(&x) + 32 * half, sizeof out);
  return out;
}

static inline int32_t _mm512_reduce_add_epi32(__m512i x) {
  const emulated::Lanes<int32_t, __m512i> lanes(x);
  int32_t sum = 0;
  for (int32_t lane : lanes.v) sum += lane;
  return sum;
}
