// The loops once, as templates over the width of a register, inlined into one set of functions for each instruction set.
//
// Written with the vector types that g++ and clang share, which are passed by reference only: by value their calling convention would
// depend on the instruction set. Whatever the width, sums run in eight lanes, in one order.
#include "sampler_loops.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#define CAVECTL_INLINE inline __attribute__((always_inline))

namespace cavectl {

namespace {

template <typename T, size_t kBytes>
struct RegisterOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <typename T, size_t kBytes>
using Register = typename RegisterOf<T, kBytes>::Type;

template <typename V>
CAVECTL_INLINE void load(V& v, const void* from) {
  std::memcpy(&v, from, sizeof v);
}

template <typename V>
CAVECTL_INLINE void raise(V& v, const V& other) {
  v = other > v ? other : v;
}

// v = exp(v) for v <= 0. v = k ln 2 + r with |r| <= ln 2 / 2; exp(r) = 1 + r + r^2 P(r), where P interpolates (exp(r) - 1 - r) / r^2
// at the Chebyshev nodes: 1.6e-17 off. ln 2 in two parts, the first of 32 bits, so that k times it is exact.
template <size_t kBytes>
CAVECTL_INLINE void exponentiate(Register<double, kBytes>& v) {
  using Doubles = Register<double, kBytes>;
  using Bits = Register<uint64_t, kBytes>;
  const Doubles lowest = Doubles{} - 708, zero{};
  const Doubles bounded = v > lowest ? v : lowest;
  const Doubles shifted = bounded * 0x1.71547652b82fep+0 + 0x1.8p52;  // k is in the low bits now
  const Doubles k = shifted - 0x1.8p52;
  const Doubles r = (bounded - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
  Doubles p = r * 0x1.af38a9b0ec855p-26 + 0x1.289185613a3d6p-22;
  p = p * r + 0x1.71de0dae63bb3p-19;
  p = p * r + 0x1.a019b90d2ae7ap-16;
  p = p * r + 0x1.a01a01a7c41d5p-13;
  p = p * r + 0x1.6c16c1788bd90p-10;
  p = p * r + 0x1.11111111109b3p-7;
  p = p * r + 0x1.5555555553d63p-5;
  p = p * r + 0x1.5555555555556p-3;
  p = p * r + 0.5;
  p = (p * (r * r) + r) + 1;
  p = (Doubles)((Bits)p + ((Bits)shifted << 52));
  v = v < lowest ? zero : p;
}

// The best of a register's lanes.
template <typename T, size_t kBytes>
CAVECTL_INLINE T best_lane(const Register<T, kBytes>& v) {
  if constexpr (kBytes > 16) {
    Register<T, kBytes / 2> low, high;
    load(low, &v);
    load(high, reinterpret_cast<const char*>(&v) + kBytes / 2);
    raise(low, high);
    return best_lane<T, kBytes / 2>(low);
  } else {
    T best = v[0];
    for (size_t lane = 1; lane < kBytes / sizeof(T); ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
  }
}

template <typename T, size_t kBytes>
CAVECTL_INLINE T block_best(const T* block) {
  constexpr size_t kLanes = kBytes / sizeof(T);
  Register<T, kBytes> best, more;
  load(best, block);
  for (size_t i = kLanes; i < kBlock; i += kLanes) {
    load(more, block + i);
    raise(best, more);
  }
  return best_lane<T, kBytes>(best);
}

// Raises `sizes` to the block's bit patterns without their signs: NaN and infinity have the largest of all.
template <size_t kBytes>
CAVECTL_INLINE void raise_sizes(Register<int32_t, kBytes>& sizes, const float* block) {
  for (size_t i = 0; i < kBlock; i += kBytes / sizeof(float)) {
    Register<int32_t, kBytes> bits;
    load(bits, block + i);
    raise(sizes, bits & 0x7fffffff);
  }
}
template <size_t kBytes>
CAVECTL_INLINE void raise_sizes(Register<int32_t, kBytes>&, const double*) {}

// The last block, where it is not full, with `filler` behind it.
template <typename T>
CAVECTL_INLINE void fill_block(const T* from, size_t count, T filler, T (&block)[kBlock]) {
  for (size_t i = 0; i < kBlock; ++i) block[i] = i < count ? from[i] : filler;
}

template <typename T, size_t kBytes>
CAVECTL_INLINE double peaks_of(const T* row, size_t n, double* peaks) {
  double best = -INFINITY;
  Register<int32_t, kBytes> sizes{};
  for (size_t b = 0; b < n / kBlock; ++b) {
    peaks[b] = double(block_best<T, kBytes>(row + b * kBlock));
    raise_sizes<kBytes>(sizes, row + b * kBlock);
    best = peaks[b] > best ? peaks[b] : best;
  }
  if (const size_t left = n % kBlock) {
    T block[kBlock];
    fill_block(row + n - left, left, row[n - 1], block);
    peaks[n / kBlock] = double(block_best<T, kBytes>(block));
    raise_sizes<kBytes>(sizes, block);
    best = peaks[n / kBlock] > best ? peaks[n / kBlock] : best;
  }
  return best_lane<int32_t, kBytes>(sizes) < 0x7f800000 ? best : NAN;
}

// A register of weights.
template <typename T, size_t kBytes>
CAVECTL_INLINE void weigh(const T* row, double best, double scale, Register<double, kBytes>& weights) {
  if constexpr (sizeof(T) == sizeof(double)) {
    load(weights, row);
  } else {
    Register<T, kBytes / 2> narrow;
    load(narrow, row);
    weights = __builtin_convertvector(narrow, Register<double, kBytes>);
  }
  weights = (weights - best) * scale;
  exponentiate<kBytes>(weights);
}

template <typename T, size_t kBytes>
CAVECTL_INLINE double block_sum(const T* block, double best, double scale) {
  constexpr size_t kLanes = kBytes / sizeof(double), kAll = 8;
  Register<double, kBytes> sums[kAll / kLanes] = {}, weights;
  for (size_t i = 0; i < kBlock; i += kAll)
    for (size_t part = 0; part < kAll / kLanes; ++part) {
      weigh<T, kBytes>(block + i + part * kLanes, best, scale, weights);
      sums[part] += weights;
    }
  double s[kAll];
  std::memcpy(s, sums, sizeof s);
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

template <typename T, size_t kBytes>
CAVECTL_INLINE double sums_of(const T* row, size_t n, double best, double scale, double* sums) {
  double total = 0;
  for (size_t b = 0; b < n / kBlock; ++b) total += sums[b] = block_sum<T, kBytes>(row + b * kBlock, best, scale);
  if (const size_t left = n % kBlock) {
    T block[kBlock];
    fill_block(row + n - left, left, T(-INFINITY), block);
    total += sums[n / kBlock] = block_sum<T, kBytes>(block, best, scale);
  }
  return total;
}

template <typename T, size_t kBytes>
CAVECTL_INLINE void weights_of(const T* row, size_t n, double best, double scale, double* weights) {
  constexpr size_t kLanes = kBytes / sizeof(double);
  Register<double, kBytes> some;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    weigh<T, kBytes>(row + i, best, scale, some);
    std::memcpy(weights + i, &some, sizeof some);
  }
  T last[kLanes] = {};
  for (size_t lane = 0; lane < n - i; ++lane) last[lane] = row[i + lane];
  weigh<T, kBytes>(last, best, scale, some);
  for (size_t lane = 0; lane < n - i; ++lane) weights[i + lane] = some[lane];
}

CAVECTL_INLINE void widened(const float* row, size_t n, double* wide) {
  for (size_t i = 0; i < n; ++i) wide[i] = double(row[i]);
}

// One instruction set's functions and their table.
#define CAVECTL_SAMPLE_LOOPS(isa, bytes, target)                                                                                  \
  namespace isa {                                                                                                           \
  template <typename T>                                                                                                     \
  target double peaks(const T* row, size_t n, double* peaks) {                                                              \
    return peaks_of<T, bytes>(row, n, peaks);                                                                                         \
  }                                                                                                                         \
  template <typename T>                                                                                                     \
  target double sums(const T* row, size_t n, double best, double scale, double* sums) {                                     \
    return sums_of<T, bytes>(row, n, best, scale, sums);                                                                              \
  }                                                                                                                         \
  template <typename T>                                                                                                     \
  target void weights(const T* row, size_t n, double best, double scale, double* weights) {                                 \
    weights_of<T, bytes>(row, n, best, scale, weights);                                                                               \
  }                                                                                                                         \
  target void widen(const float* row, size_t n, double* wide) { widened(row, n, wide); }                                    \
  constexpr SampleLoops kTable = {#isa,                                                                                     \
                                  {peaks<float>, sums<float>, weights<float>},                                              \
                                  {peaks<double>, sums<double>, weights<double>},                                           \
                                  widen};                                                                                   \
  }

#if defined(__x86_64__)
CAVECTL_SAMPLE_LOOPS(avx512, 64, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
CAVECTL_SAMPLE_LOOPS(avx2, 32, __attribute__((target("avx2"))))
#endif
CAVECTL_SAMPLE_LOOPS(baseline, 16, )

}  // namespace

const SampleLoops* sample_loops(int index) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && index-- == 0) {
    return &avx512::kTable;
  }
  if (avx2 && index-- == 0) return &avx2::kTable;
#endif
  return index == 0 ? &baseline::kTable : nullptr;
}

}  // namespace cavectl
