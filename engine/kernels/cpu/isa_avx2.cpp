// The kernels for AVX2 with FMA and F16C. Compiled with those instructions: nothing here may run before the machine was asked.
#include <immintrin.h>
#include <math.h>

#include "kernels.h"

namespace cavectl {
namespace avx2 {
namespace {
constexpr const char* kName = "avx2";
}
#include "simd_avx2.h"

#include "kernels.inl"
}  // namespace avx2

const Kernels* kernels_avx2_table() { return &avx2::kTable; }

}  // namespace cavectl
