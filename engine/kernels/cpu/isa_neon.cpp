// The kernels for AArch64 with dot products. Compiled with those instructions: nothing here may run before the machine was asked.
#include <arm_neon.h>
#include <math.h>

#include "kernels.h"

namespace cavectl {
namespace neon {
namespace {
constexpr const char* kName = "neon";
}
#include "simd_neon.h"

#include "kernels.inl"
}  // namespace neon

const Kernels* kernels_neon_table() { return &neon::kTable; }

}  // namespace cavectl
