// The kernels for AVX-512 with VNNI. Compiled with those instructions: nothing here may run before the machine was asked.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the header's own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#include <math.h>

#include "kernels.h"

namespace cavectl {
namespace avx512 {
namespace {
constexpr const char* kName = "avx512";
}
#include "simd_avx512.h"

#include "kernels.inl"
}  // namespace avx512

const Kernels* kernels_avx512_table() { return &avx512::kTable; }

}  // namespace cavectl
