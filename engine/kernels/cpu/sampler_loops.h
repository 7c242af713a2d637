// The sampler's passes over a whole vocabulary, compiled for each instruction set of the machine's architecture.
//
// Owned here: best, exp and sum of many numbers. Not here: what they are for (sampler.cpp). Invariant: every table gives the same bits,
// because each loop is written once, in one order, without fused multiply-adds.
#pragma once
#include <cstddef>

namespace cavectl {

constexpr size_t kBlock = 64;  // ids whose best, or sum of weights, is kept

inline constexpr size_t blocks(size_t n) { return (n + kBlock - 1) / kBlock; }

// The weight of a score is exp((score - best) * scale), best >= score, scale > 0: in (0, 1], exactly 1 at the best; 0 below exp(-708).
// Off by less than 2 units in the last place, plus what the rounding of its argument makes of it.
template <typename T>
struct RowLoops {
  // peaks[b]: the best of block b. Returns the best of all: for floats NaN where one is NaN or infinite; doubles may be -inf.
  double (*peaks)(const T* row, size_t n, double* peaks);

  // sums[b]: the weights of block b together. Returns the sum of the sums, in their order.
  double (*sums)(const T* row, size_t n, double best, double scale, double* sums);

  void (*weights)(const T* row, size_t n, double best, double scale, double* weights);
};

struct SampleLoops {
  const char* name;
  RowLoops<float> f32;
  RowLoops<double> f64;

  void (*widen)(const float* row, size_t n, double* wide);
};

// Tables of this build that this machine runs, best first; null behind the last.
const SampleLoops* sample_loops(int index);

template <typename T>
const RowLoops<T>& row_loops(const SampleLoops& loops);
template <>
inline const RowLoops<float>& row_loops<float>(const SampleLoops& loops) {
  return loops.f32;
}
template <>
inline const RowLoops<double>& row_loops<double>(const SampleLoops& loops) {
  return loops.f64;
}

}  // namespace cavectl
