// The kernels in plain C++: what runs where nothing better does, and what the others are compared with.
#include <math.h>

#include "kernels.h"

namespace cavectl {
namespace scalar {
namespace {
constexpr const char* kName = "scalar";
}
#include "simd_scalar.h"

#include "kernels.inl"
}  // namespace scalar

const Kernels* kernels_scalar_table() { return &scalar::kTable; }

}  // namespace cavectl
