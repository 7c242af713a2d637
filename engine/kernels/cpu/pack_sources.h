// The block types of checkpoints: how numbers, scales and minimums lie in a block of each.
//
// Owned here: one struct per type. Not here: where they go (pack.cpp). Invariant: a weight is scale * (stored - offset) + minimum with
// the offset of the kind that the type is packed into; any bit pattern of a block gives some numbers. Source: the block structs of
// ggml; engine/quant/gguf_dequantize.py says the same in torch.
//
// A struct has kName, kElements and kBytes of a block, kKind, and
//   numbers(block, q): kElements stored numbers of the kind, in column order;
//   kExact, scales(block, s, m): float16 bits as they lie in the file where kExact, else float32. One per part, the parts of a block
//   in column order: of 32 columns, or of 16 where the kind has two scales.
#pragma once
#include "formats.h"
#include "half.h"

namespace cavectl {

inline uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

// 32 numbers in 16 bytes: the low nibbles first.
inline void nibbles(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[16 + i] = p[i] >> 4;
  }
}

// The fifth bits of 32 numbers, bit i for number i; `more` is added to each.
inline void fifth_bits(const uint8_t* p, uint8_t* q, uint8_t more) {
  for (int i = 0; i < 32; ++i) q[i] = uint8_t((q[i] | (p[i / 8] >> (i % 8) & 1) << 4) + more);
}

struct SourceQ4_0 {
  static constexpr const char* kName = "Q4_0";
  static constexpr size_t kElements = 32, kBytes = 18;
  static constexpr Kind kKind = kQ4_S;
  static constexpr bool kExact = true;
  static void numbers(const uint8_t* b, uint8_t* q) { nibbles(b + 2, q); }
  static void scales(const uint8_t* b, uint16_t* s, uint16_t*) { *s = half_at(b); }
};

struct SourceQ4_1 {
  static constexpr const char* kName = "Q4_1";
  static constexpr size_t kElements = 32, kBytes = 20;
  static constexpr Kind kKind = kQ4_M;
  static constexpr bool kExact = true;
  static void numbers(const uint8_t* b, uint8_t* q) { nibbles(b + 4, q); }
  static void scales(const uint8_t* b, uint16_t* s, uint16_t* m) {
    *s = half_at(b);
    *m = half_at(b + 2);
  }
};

struct SourceQ5_0 {
  static constexpr const char* kName = "Q5_0";
  static constexpr size_t kElements = 32, kBytes = 22;
  static constexpr Kind kKind = kQ8_S;
  static constexpr bool kExact = true;
  static void numbers(const uint8_t* b, uint8_t* q) {
    nibbles(b + 6, q);
    fifth_bits(b + 2, q, 128 - 16);
  }
  static void scales(const uint8_t* b, uint16_t* s, uint16_t*) { *s = half_at(b); }
};

struct SourceQ5_1 {
  static constexpr const char* kName = "Q5_1";
  static constexpr size_t kElements = 32, kBytes = 24;
  static constexpr Kind kKind = kQ8_M;
  static constexpr bool kExact = true;
  static void numbers(const uint8_t* b, uint8_t* q) {
    nibbles(b + 8, q);
    fifth_bits(b + 4, q, 0);
  }
  static void scales(const uint8_t* b, uint16_t* s, uint16_t* m) {
    *s = half_at(b);
    *m = half_at(b + 2);
  }
};

struct SourceQ8_0 {
  static constexpr const char* kName = "Q8_0";
  static constexpr size_t kElements = 32, kBytes = 34;
  static constexpr Kind kKind = kQ8_S;
  static constexpr bool kExact = true;
  static void numbers(const uint8_t* b, uint8_t* q) {
    for (size_t i = 0; i < kElements; ++i) q[i] = b[2 + i] ^ 128;
  }
  static void scales(const uint8_t* b, uint16_t* s, uint16_t*) { *s = half_at(b); }
};

// 256 pairs of bits in 64 bytes: planes of 32 numbers, four to 32 bytes.
inline void bit_pairs(const uint8_t* p, uint8_t* q) {
  for (int half = 0; half < 2; ++half) {
    for (int plane = 0; plane < 4; ++plane) {
      for (int i = 0; i < 32; ++i) q[128 * half + 32 * plane + i] = p[32 * half + i] >> (2 * plane) & 3;
    }
  }
}

// 256 bits in 32 bytes, bit `plane` of byte i for number 32 * plane + i; each goes to bit `to` of its number.
inline void bit_planes(const uint8_t* p, uint8_t* q, int to) {
  for (int plane = 0; plane < 8; ++plane) {
    for (int i = 0; i < 32; ++i) q[32 * plane + i] = uint8_t(q[32 * plane + i] | (p[i] >> plane & 1) << to);
  }
}

// 256 nibbles in 128 bytes: of each 32 bytes the low ones, then the high ones.
inline void nibble_planes(const uint8_t* p, uint8_t* q) {
  for (int chunk = 0; chunk < 4; ++chunk) {
    for (int i = 0; i < 32; ++i) {
      q[64 * chunk + i] = p[32 * chunk + i] & 15;
      q[64 * chunk + 32 + i] = p[32 * chunk + i] >> 4;
    }
  }
}

// d, dmin, then 8 six-bit scales and 8 six-bit minimums in 12 bytes: the low 6 bits of bytes 0-3 and 4-7 are the first four of each;
// their top 2 bits belong to the last four, whose low nibbles are in bytes 8-11.
inline void six_bit_scales(const uint8_t* b, float* s, float* m) {
  const float d = half_to_float(half_at(b)), dmin = half_to_float(half_at(b + 2));
  const uint8_t* p = b + 4;
  for (int i = 0; i < 4; ++i) {
    s[i] = d * float(p[i] & 63);
    m[i] = -(dmin * float(p[4 + i] & 63));
    s[4 + i] = d * float((p[8 + i] & 15) | p[i] >> 6 << 4);
    m[4 + i] = -(dmin * float(p[8 + i] >> 4 | p[4 + i] >> 6 << 4));
  }
}

struct SourceQ2_K {
  static constexpr const char* kName = "Q2_K";
  static constexpr size_t kElements = 256, kBytes = 84;
  static constexpr Kind kKind = kQ4_M16;
  static constexpr bool kExact = false;
  static void numbers(const uint8_t* b, uint8_t* q) { bit_pairs(b + 16, q); }
  static void scales(const uint8_t* b, float* s, float* m) {
    const float d = half_to_float(half_at(b + 80)), dmin = half_to_float(half_at(b + 82));
    for (int i = 0; i < 16; ++i) {
      s[i] = d * float(b[i] & 15);
      m[i] = -(dmin * float(b[i] >> 4));
    }
  }
};

// A high bit that is not set takes 4 away: 4 scales is the minimum. Scales: 16 low nibbles in 8 bytes, 16 pairs of high bits in 4.
struct SourceQ3_K {
  static constexpr const char* kName = "Q3_K";
  static constexpr size_t kElements = 256, kBytes = 110;
  static constexpr Kind kKind = kQ4_M16;
  static constexpr bool kExact = false;
  static void numbers(const uint8_t* b, uint8_t* q) {
    bit_pairs(b + 32, q);
    bit_planes(b, q, 2);
  }
  static void scales(const uint8_t* b, float* s, float* m) {
    const float d = half_to_float(half_at(b + 108));
    const uint8_t* p = b + 96;
    for (int i = 0; i < 16; ++i) {
      const int low = i < 8 ? p[i] & 15 : p[i - 8] >> 4, high = p[8 + i % 4] >> (i / 4 * 2) & 3;
      s[i] = d * float((low | high << 4) - 32);
      m[i] = -4.0f * s[i];
    }
  }
};

struct SourceQ4_K {
  static constexpr const char* kName = "Q4_K";
  static constexpr size_t kElements = 256, kBytes = 144;
  static constexpr Kind kKind = kQ4_M;
  static constexpr bool kExact = false;
  static void numbers(const uint8_t* b, uint8_t* q) { nibble_planes(b + 16, q); }
  static void scales(const uint8_t* b, float* s, float* m) { six_bit_scales(b, s, m); }
};

struct SourceQ5_K {
  static constexpr const char* kName = "Q5_K";
  static constexpr size_t kElements = 256, kBytes = 176;
  static constexpr Kind kKind = kQ8_M;
  static constexpr bool kExact = false;
  static void numbers(const uint8_t* b, uint8_t* q) {
    nibble_planes(b + 48, q);
    bit_planes(b + 16, q, 4);
  }
  static void scales(const uint8_t* b, float* s, float* m) { six_bit_scales(b, s, m); }
};

// 256 low nibbles (of each 64 bytes the low ones first), 256 pairs of high bits, 16 int8 scales, d. Numbers less 32.
struct SourceQ6_K {
  static constexpr const char* kName = "Q6_K";
  static constexpr size_t kElements = 256, kBytes = 210;
  static constexpr Kind kKind = kQ8_S16;
  static constexpr bool kExact = false;
  static void numbers(const uint8_t* b, uint8_t* q) {
    uint8_t high[kElements];
    bit_pairs(b + 128, high);
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 64; ++i) {
        q[128 * half + i] = b[64 * half + i] & 15;
        q[128 * half + 64 + i] = b[64 * half + i] >> 4;
      }
    }
    for (size_t i = 0; i < kElements; ++i) q[i] = uint8_t((q[i] | high[i] << 4) + 128 - 32);
  }
  static void scales(const uint8_t* b, float* s, float*) {
    const float d = half_to_float(half_at(b + 208));
    for (int i = 0; i < 16; ++i) s[i] = d * float(int8_t(b[192 + i]));
  }
};

}  // namespace cavectl
