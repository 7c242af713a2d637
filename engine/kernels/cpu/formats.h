// How weights lie in a packed file: rows in panels of 16, interleaved, so that one register lane is one row on every ISA.
//
// Owned here: the kinds, their block layouts and sizes, the file's header. Not here: making them (pack.cpp) and multiplying by them
// (matmul.inl). Invariant: one layout serves AVX2, AVX-512 and NEON; lane r of a panel is row 16 * panel + r, rows beyond the last
// are zero. All numbers are little-endian.
//
// A block of an integer kind holds 32 columns of 16 rows:
//   4-bit: 4 groups of 64 bytes. Byte 4 r + i of group j: low nibble column 8 j + i, high nibble column 8 j + 4 + i, of row r.
//   8-bit: 8 groups of 64 bytes. Byte 4 r + i of group j: column 4 j + i of row r, plus 128 where the kind is signed.
//   then 16 float16 scales (two times 16 where scales are per 16 columns: first half, second half), then as many minimums
//   where the kind has them.
//   weight = scale * (q - offset) [+ minimum], times 2^-exponent of the whole tensor; offset 8 for Q4_S, 128 for the 8-bit ones
//   that are signed (stored + 128), else 0.
// A float kind holds, column after column, 16 values of the stored type (the 16 rows). A vector is plain float32.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cavectl {

constexpr int kPanelRows = 16;
constexpr int kBlockColumns = 32;
constexpr uint32_t kPackedVersion = 1;
constexpr uint64_t kAlignment = 64;  // of every tensor's bytes in the file
constexpr uint64_t kMostSide = uint64_t(1) << 32, kMostElements = uint64_t(1) << 48;
constexpr int32_t kMostExponent = 120;  // 2^-120 .. 2^120 are normal float32

enum Kind : uint32_t {
  kVectorF32 = 0,  // norms and biases: rows = 1, columns = length
  kF32 = 1,
  kF16 = 2,
  kBF16 = 3,
  kQ4_S = 4,    // 4-bit, offset 8, scale per 32             (Q4_0)
  kQ4_M = 5,    // 4-bit, scale and minimum per 32           (Q4_1, Q4_K)
  kQ4_M16 = 6,  // 4-bit, scale and minimum per 16           (Q2_K, Q3_K)
  kQ8_S = 7,    // 8-bit signed, scale per 32                (Q8_0, Q5_0)
  kQ8_M = 8,    // 8-bit unsigned 0..255, scale and minimum per 32 (Q5_1, Q5_K)
  kQ8_S16 = 9,  // 8-bit signed, scale per 16                (Q6_K)
  kKinds = 10,
};

struct KindInfo {
  int bits;        // per weight: 4, 8, 16, 32
  int scales;      // scales per row and block: 0 (float), 1 or 2
  bool minimums;   // as many as scales
  int offset;      // taken from the stored number
};

inline constexpr KindInfo kKindInfo[kKinds] = {
    {32, 0, false, 0}, {32, 0, false, 0}, {16, 0, false, 0}, {16, 0, false, 0},   {4, 1, false, 8},
    {4, 1, true, 0},   {4, 2, true, 0},   {8, 1, false, 128}, {8, 1, true, 0}, {8, 2, false, 128},
};

inline constexpr bool is_integer(uint32_t kind) { return kind >= kQ4_S && kind < kKinds; }

// Bytes of one block (32 columns of 16 rows) of an integer kind.
inline constexpr size_t block_bytes(uint32_t kind) {
  const KindInfo& k = kKindInfo[kind];
  return size_t(kPanelRows) * (kBlockColumns * k.bits / 8 + 2 * k.scales * (k.minimums ? 2 : 1));
}

// Bytes of one panel. An integer kind's columns are a multiple of 32.
inline constexpr size_t panel_bytes(uint32_t kind, uint64_t columns) {
  return is_integer(kind) ? columns / kBlockColumns * block_bytes(kind) : columns * kPanelRows * kKindInfo[kind].bits / 8;
}

inline constexpr uint64_t panels(uint64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

inline constexpr uint64_t tensor_bytes(uint32_t kind, uint64_t rows, uint64_t columns) {
  return kind == kVectorF32 ? 4 * columns : panels(rows) * panel_bytes(kind, columns);
}

// Whether a tensor may have this kind and shape. If so, none of the sizes above overflows.
inline constexpr bool is_shape(uint32_t kind, uint64_t rows, uint64_t columns) {
  if (kind >= kKinds || rows < 1 || columns < 1 || rows > kMostSide || columns > kMostSide) return false;
  if (rows > kMostElements / columns) return false;
  return kind == kVectorF32 ? rows == 1 : !is_integer(kind) || columns % kBlockColumns == 0;
}

// The file: FileHeader, then `tensors` TensorRecords, then a JSON block of `meta_bytes` at `meta_offset` with names and everything
// about the source, which C++ never reads, then the tensors' bytes in order, each at the first multiple of kAlignment behind what is
// before it. The file ends with the last one.
struct FileHeader {
  char magic[8];  // "CAVEPACK"
  uint32_t version;
  uint32_t tensors;
  uint64_t file_bytes;
  uint64_t meta_offset, meta_bytes;
  uint64_t reserved;  // 0
};
static_assert(sizeof(FileHeader) == 48);

struct TensorRecord {
  uint32_t kind;
  int32_t exponent;  // the weights are the stored ones times 2^-exponent
  uint64_t rows, columns;
  uint64_t offset, bytes;
  uint64_t reserved;  // 0
};
static_assert(sizeof(TensorRecord) == 48);

}  // namespace cavectl
