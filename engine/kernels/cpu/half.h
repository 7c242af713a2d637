// float16 and bfloat16 to float32 and back, in plain integer arithmetic: for code that is compiled without an instruction set of its own.
//
// Not here: the lanes that the kernels use (simd_*.h). Invariant: conversions are exact, or round half to even; too large becomes
// infinite, NaN stays NaN. Any bit pattern is good input.
#pragma once
#include <cstdint>
#include <cstring>

namespace cavectl {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float size = float(fraction) * 0x1p-24f;
    return sign ? -size : size;
  }
  return float_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of_float(value), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (size > 0x7f800000u) return uint16_t(sign | 0x7e00u | (size >> 13 & 0x1ffu));
  if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520: halfway from the largest float16 to the next step
  if (size < 0x38800000u) {                                  // below 2^-14: adding 0.5 leaves units of 2^-24, rounded half to even
    return uint16_t(sign | (bits_of_float(float_from_bits(size) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | (((size + 0xfffu + (size >> 13 & 1u)) >> 13) - (112u << 10)));
}

inline float bfloat_to_float(uint16_t bits) { return float_from_bits(uint32_t(bits) << 16); }

}  // namespace cavectl
