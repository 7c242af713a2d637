// A checkpoint's tensors into the packed form, panel by panel.
//
// Owned here: cavectl_pack: the checks of sizes, the order of rows, a tensor's exponent, and where each number goes. Not here: what lies
// in a source's block (pack_sources.h), the layout (formats.h), the file (engine/weights/packed.py). Invariant: float16 scales of the
// source are copied to the bit; others are scale * 2^exponent rounded once to float16. Whatever the bytes hold, nothing is read or
// written outside of both buffers.
#include <cmath>

#include "abi_error.h"
#include "cavectl.h"
#include "pack_sources.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the packed layout is little-endian");

namespace cavectl {
namespace {

struct Job {
  const uint8_t* source;
  uint64_t rows, columns, row_bytes;
  uint64_t head_pairs;  // half the rows of a head whose halves lie interleaved, 0 where rows are in order
  uint8_t* target;
  uint64_t panel_bytes;

  // Where row `row` of the result lies in the source: of each head x0 y0 x1 y1 ..., the result has all x before all y.
  const uint8_t* row(uint64_t row) const {
    if (head_pairs) {
      const uint64_t head = row / (2 * head_pairs), in_head = row % (2 * head_pairs);
      row = 2 * (head * head_pairs + in_head % head_pairs) + in_head / head_pairs;
    }
    return source + row * row_bytes;
  }

  // Calls f(panel's bytes, lane, row's bytes) for each row. Lanes beyond the last row are zero.
  template <typename F>
  void each_row(const F& f) const {
    if (rows % kPanelRows) std::memset(target + rows / kPanelRows * panel_bytes, 0, panel_bytes);
    for (uint64_t r = 0; r < rows; ++r) f(target + r / kPanelRows * panel_bytes, r % kPanelRows, row(r));
  }
};

// --- integer kinds ----------------------------------------------------------------------------------------------------------------

template <typename S>
constexpr size_t kPartsOf = S::kElements / kBlockColumns * kKindInfo[S::kKind].scales;

// 32 numbers of a row into its lane of a block.
template <int kBits>
void put_numbers(const uint8_t* q, uint8_t* block, size_t lane) {
  for (int group = 0; group < kBits; ++group) {
    uint32_t word;
    if constexpr (kBits == 4) {
      uint64_t eight;
      std::memcpy(&eight, q + 8 * group, sizeof eight);
      word = uint32_t(eight) | uint32_t(eight >> 32) << 4;
    } else {
      std::memcpy(&word, q + 4 * group, sizeof word);
    }
    std::memcpy(block + 64 * group + 4 * lane, &word, sizeof word);
  }
}

inline void put_half(uint8_t* halves, size_t at, uint16_t half) { std::memcpy(halves + 2 * at, &half, sizeof half); }

template <typename S>
void put_scales(const uint8_t* source, uint8_t* blocks, size_t lane, float factor) {
  constexpr KindInfo kInfo = kKindInfo[S::kKind];
  constexpr size_t kScalesAt = size_t(kPanelRows) * kBlockColumns * kInfo.bits / 8;
  uint16_t s[kPartsOf<S>], m[kPartsOf<S>] = {};
  if constexpr (S::kExact) {
    S::scales(source, s, m);
  } else {
    float scales[kPartsOf<S>], minimums[kPartsOf<S>] = {};
    S::scales(source, scales, minimums);
    for (size_t part = 0; part < kPartsOf<S>; ++part) {
      s[part] = float_to_half(scales[part] * factor);
      m[part] = kInfo.minimums ? float_to_half(minimums[part] * factor) : uint16_t(0);
    }
  }
  for (size_t part = 0; part < kPartsOf<S>; ++part) {
    uint8_t* halves = blocks + part / kInfo.scales * block_bytes(S::kKind) + kScalesAt;
    const size_t at = part % kInfo.scales * kPanelRows + lane;
    put_half(halves, at, s[part]);
    if (kInfo.minimums) put_half(halves, at + kInfo.scales * kPanelRows, m[part]);
  }
}

template <typename S>
void pack_blocks(const Job& job, int32_t exponent) {
  const float factor = std::ldexp(1.0f, exponent);
  job.each_row([&](uint8_t* panel, size_t lane, const uint8_t* source) {
    for (uint64_t column = 0; column < job.columns; column += S::kElements, source += S::kBytes) {
      uint8_t q[S::kElements];
      S::numbers(source, q);
      uint8_t* blocks = panel + column / kBlockColumns * block_bytes(S::kKind);
      put_scales<S>(source, blocks, lane, factor);
      for (size_t at = 0; at < S::kElements; at += kBlockColumns, blocks += block_bytes(S::kKind)) {
        put_numbers<kKindInfo[S::kKind].bits>(q + at, blocks, lane);
      }
    }
  });
}

// Sizes of a tensor's finite scales and minimums, as the bits of float32: those order as the numbers do.
struct Range {
  uint32_t least = 0x7f800000u, most = 0;  // least: of those that are not 0

  void add(float value) {
    const uint32_t size = bits_of_float(value) & 0x7fffffffu;
    if (size >= 0x7f800000u) return;
    if (size > most) most = size;
    if (size && size < least) least = size;
  }
};

inline int32_t power_of_two(uint32_t bits) { return int32_t(bits >> 23) - 127; }  // floor(log2), of a normal float32

// The exponent with which the least scale is a normal float16, or else the most one stays just below 2^15; 0 where it is not needed.
int32_t fitting_exponent(const Range& range) {
  if (range.most == 0) return 0;
  const int32_t room = 14 - power_of_two(range.most), needed = -14 - power_of_two(range.least);
  if (room < 0) return room;
  if (needed < 0) return 0;
  return needed < room ? needed : room;
}

template <typename S>
int32_t choose_exponent(const Job& job) {
  if constexpr (S::kExact) {
    return 0;
  } else {
    Range range;
    const uint8_t* end = job.source + job.rows * job.row_bytes;
    for (const uint8_t* block = job.source; block < end; block += S::kBytes) {
      float scales[kPartsOf<S>], minimums[kPartsOf<S>] = {};
      S::scales(block, scales, minimums);
      for (size_t part = 0; part < kPartsOf<S>; ++part) {
        range.add(scales[part]);
        range.add(minimums[part]);
      }
    }
    return fitting_exponent(range);
  }
}

// --- float kinds ------------------------------------------------------------------------------------------------------------------

constexpr size_t kTileColumns = 256;  // of a row are converted at a time: whole blocks of every type

template <size_t kItemBytes>
void put_items(const void* items, size_t count, uint8_t* at, size_t lane) {
  for (size_t c = 0; c < count; ++c) {
    std::memcpy(at + (c * kPanelRows + lane) * kItemBytes, static_cast<const uint8_t*>(items) + c * kItemBytes, kItemBytes);
  }
}

// 16-bit items as they are.
void pack_plain(const Job& job) {
  job.each_row([&](uint8_t* panel, size_t lane, const uint8_t* source) { put_items<2>(source, job.columns, panel, lane); });
}

// Sources as float32: convert(row's bytes at a multiple of kTileColumns, count, out).
using Convert = void (*)(const uint8_t* source, size_t count, float* out);

void convert_f32(const uint8_t* source, size_t count, float* out) { std::memcpy(out, source, count * sizeof(float)); }

void convert_f64(const uint8_t* source, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) {
    double value;
    std::memcpy(&value, source + i * sizeof value, sizeof value);
    out[i] = float(value);
  }
}

template <float (*kToFloat)(uint16_t)>
void convert_16(const uint8_t* source, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = kToFloat(half_at(source + 2 * i));
}

template <typename S>
void convert_blocks(const uint8_t* source, size_t count, float* out) {
  constexpr KindInfo kInfo = kKindInfo[S::kKind];
  constexpr size_t kPartColumns = kBlockColumns / kInfo.scales;
  for (; count; count -= S::kElements, source += S::kBytes) {
    uint8_t q[S::kElements];
    S::numbers(source, q);
    float s[kPartsOf<S>], m[kPartsOf<S>] = {};
    if constexpr (S::kExact) {
      uint16_t scale, minimum = 0;
      S::scales(source, &scale, &minimum);
      s[0] = half_to_float(scale);
      m[0] = half_to_float(minimum);
    } else {
      S::scales(source, s, m);
    }
    for (size_t c = 0; c < S::kElements; ++c) {
      const float value = s[c / kPartColumns] * float(int(q[c]) - kInfo.offset);
      *out++ = kInfo.minimums ? value + m[c / kPartColumns] : value;
    }
  }
}

struct SourceType {
  const char* name;
  uint64_t elements, bytes;  // of a block
  Kind kind;                 // a matrix's; every type can become kF32 and kVectorF32 too
  Convert convert;
  void (*pack)(const Job& job, int32_t exponent);
  int32_t (*exponent)(const Job& job);
};

void pack_f32(const Job& job, const SourceType& type) {
  job.each_row([&](uint8_t* panel, size_t lane, const uint8_t* source) {
    for (uint64_t first = 0; first < job.columns; first += kTileColumns) {
      const size_t count = job.columns - first < kTileColumns ? job.columns - first : kTileColumns;
      float values[kTileColumns];
      type.convert(source + first / type.elements * type.bytes, count, values);
      put_items<4>(values, count, panel + first * kPanelRows * sizeof(float), lane);
    }
  });
}

// Rows one after another as plain float32.
void pack_vector(const Job& job, const SourceType& type) {
  for (uint64_t r = 0; r < job.rows; ++r) {
    for (uint64_t first = 0; first < job.columns; first += kTileColumns) {
      const size_t count = job.columns - first < kTileColumns ? job.columns - first : kTileColumns;
      float values[kTileColumns];
      type.convert(job.row(r) + first / type.elements * type.bytes, count, values);
      std::memcpy(job.target + (r * job.columns + first) * sizeof(float), values, count * sizeof(float));
    }
  }
}

// --- types ------------------------------------------------------------------------------------------------------------------------

template <typename S>
constexpr SourceType block_type() {
  return {S::kName, S::kElements, S::kBytes, S::kKind, convert_blocks<S>, pack_blocks<S>, choose_exponent<S>};
}

void pack_as_is(const Job& job, int32_t) { pack_plain(job); }
int32_t no_exponent(const Job&) { return 0; }

constexpr SourceType kTypes[] = {
    {"F64", 1, 8, kF32, convert_f64, nullptr, no_exponent},
    {"F32", 1, 4, kF32, convert_f32, nullptr, no_exponent},
    {"F16", 1, 2, kF16, convert_16<half_to_float>, pack_as_is, no_exponent},
    {"BF16", 1, 2, kBF16, convert_16<bfloat_to_float>, pack_as_is, no_exponent},
    block_type<SourceQ4_0>(),
    block_type<SourceQ4_1>(),
    block_type<SourceQ5_0>(),
    block_type<SourceQ5_1>(),
    block_type<SourceQ8_0>(),
    block_type<SourceQ2_K>(),
    block_type<SourceQ3_K>(),
    block_type<SourceQ4_K>(),
    block_type<SourceQ5_K>(),
    block_type<SourceQ6_K>(),
};

const SourceType* find_type(const char* name) {
  for (const SourceType& type : kTypes) {
    if (name && std::strcmp(type.name, name) == 0) return &type;
  }
  return nullptr;
}

// --- the checks -------------------------------------------------------------------------------------------------------------------

const char* request_error(const SourceType* type, uint32_t kind, uint64_t rows, uint64_t columns) {
  if (!type) return "the type is not one that can be packed";
  if (kind != type->kind && kind != kF32 && kind != kVectorF32) return "the type cannot become this kind";
  if (!is_shape(kind, rows, columns)) return "the tensor's shape is out of range";
  if (columns % type->elements) return "the columns are no multiple of the type's block";
  return nullptr;
}

const char* heads_error(const SourceType& type, uint64_t rows, bool elements, uint64_t heads) {
  if (heads && (heads > rows / 2 || rows % (2 * heads))) return "the rows are no multiple of twice the heads";
  if (elements && type.elements != 1) return "a vector of blocks cannot be put in another order";
  return nullptr;
}

}  // namespace
}  // namespace cavectl

using namespace cavectl;

int32_t cavectl_pack(const char* type, const void* source, uint64_t source_bytes, uint64_t rows, uint64_t columns,
                     uint64_t interleaved_heads, uint32_t kind, void* target, uint64_t target_bytes, int32_t* exponent, char* error) {
  const SourceType* from = find_type(type);
  const bool elements = kind == kVectorF32 && interleaved_heads;  // a vector's, in another order: rows of one each
  const char* wrong = request_error(from, kind, rows, columns);
  if (!wrong) wrong = heads_error(*from, elements ? columns : rows, elements, interleaved_heads);
  if (wrong) return fail(error, CAVECTL_INVALID, wrong);
  if (source_bytes != rows * (columns / from->elements * from->bytes) || target_bytes != tensor_bytes(kind, rows, columns)) {
    return fail(error, CAVECTL_INVALID, "the buffers are not as long as the shape says");
  }
  Job job;
  job.source = static_cast<const uint8_t*>(source);
  job.target = static_cast<uint8_t*>(target);
  job.rows = elements ? columns : rows;
  job.columns = elements ? 1 : columns;
  job.row_bytes = source_bytes / job.rows;
  job.head_pairs = interleaved_heads ? job.rows / interleaved_heads / 2 : 0;
  job.panel_bytes = panel_bytes(kind, columns);
  *exponent = 0;
  if (kind == kVectorF32) {
    pack_vector(job, *from);
  } else if (kind == kF32) {
    pack_f32(job, *from);
  } else {
    *exponent = from->exponent(job);
    from->pack(job, *exponent);
  }
  return 0;
}
