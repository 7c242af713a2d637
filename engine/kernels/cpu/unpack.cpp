// The packed form back into float32: what the kernels take the weights for.
//
// Owned here: cavectl_unpack. Not here: the kernels' own reading of a row (kernels.inl), which gives the same bits. Invariant: nothing
// is read outside of the packed bytes, whose count must be what kind and shape say.
#include <cmath>

#include "abi_error.h"
#include "cavectl.h"
#include "formats.h"
#include "half.h"

namespace cavectl {
namespace {

float item_value(uint32_t kind, const uint8_t* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, kKindInfo[kind].bits / 8);
  if (kind == kF16) return half_to_float(uint16_t(bits));
  return float_from_bits(kind == kBF16 ? bits << 16 : bits);
}

float half_value(const uint8_t* halves, size_t at) {
  uint16_t half;
  std::memcpy(&half, halves + 2 * at, sizeof half);
  return half_to_float(half);
}

int stored_number(int bits, const uint8_t* block, size_t lane, size_t column) {
  if (bits == 8) return block[64 * (column / 4) + 4 * lane + column % 4];
  const uint8_t pair = block[64 * (column / 8) + 4 * lane + column % 4];
  return column % 8 < 4 ? pair & 15 : pair >> 4;
}

void unpack_block(uint32_t kind, const uint8_t* block, size_t lane, float factor, float* out) {
  const KindInfo& info = kKindInfo[kind];
  const uint8_t* halves = block + kPanelRows * kBlockColumns * info.bits / 8;
  for (size_t column = 0; column < kBlockColumns; ++column) {
    const size_t part = column * info.scales / kBlockColumns;
    float value = half_value(halves, part * kPanelRows + lane) * float(stored_number(info.bits, block, lane, column) - info.offset);
    if (info.minimums) value += half_value(halves, (info.scales + part) * kPanelRows + lane);
    out[column] = value * factor;
  }
}

void unpack_row(uint32_t kind, const uint8_t* panel, size_t lane, uint64_t columns, float factor, float* out) {
  if (is_integer(kind)) {
    for (uint64_t column = 0; column < columns; column += kBlockColumns, panel += block_bytes(kind)) {
      unpack_block(kind, panel, lane, factor, out + column);
    }
    return;
  }
  const size_t item = kKindInfo[kind].bits / 8, lanes = kind == kVectorF32 ? 1 : kPanelRows;
  for (uint64_t column = 0; column < columns; ++column) out[column] = item_value(kind, panel + (column * lanes + lane) * item) * factor;
}

const char* unpack_error(uint32_t kind, int32_t exponent, uint64_t bytes, uint64_t rows, uint64_t columns) {
  if (!is_shape(kind, rows, columns)) return "no tensor has this kind and shape";
  if (exponent < -kMostExponent || exponent > kMostExponent) return "the exponent is out of range";
  if (bytes != tensor_bytes(kind, rows, columns)) return "the packed bytes are not as many as the shape says";
  return nullptr;
}

}  // namespace
}  // namespace cavectl

using namespace cavectl;

int32_t cavectl_unpack(uint32_t kind, int32_t exponent, const void* packed, uint64_t bytes, uint64_t rows, uint64_t columns,
                       uint64_t first, uint64_t count, float* target, char* error) {
  if (const char* wrong = unpack_error(kind, exponent, bytes, rows, columns)) return fail(error, CAVECTL_INVALID, wrong);
  if (first > rows || count > rows - first) return fail(error, CAVECTL_INVALID, "the rows asked for are not all there");
  const float factor = std::ldexp(1.0f, -exponent);
  for (uint64_t row = first; row < first + count; ++row, target += columns) {
    const uint8_t* panel = static_cast<const uint8_t*>(packed) + row / kPanelRows * panel_bytes(kind, columns);
    unpack_row(kind, panel, row % kPanelRows, columns, factor, target);
  }
  return 0;
}
