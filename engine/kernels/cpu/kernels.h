// What every instruction set offers to the step: a table of functions over plain buffers, one table per isa_<name>.cpp.
//
// Owned here: the meaning of the buffers. Invariant: every function gives the same bits on every instruction set and for every cut of
// its work into pieces: integer dots are exact, and each float formula is written once (kernels.inl), in one order.
// Rows of float buffers are `stride` apart, a multiple of 16, and what lies behind their last value is zero.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace cavectl {

inline constexpr size_t padded(size_t n) { return (n + 15) / 16 * 16; }

enum Activation : uint32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kActivations = 4 };
enum KvType : uint32_t { kKvF32 = 0, kKvF16 = 1, kKvInt8 = 2, kKvTypes = 3 };

constexpr int kPageTokens = 16;
constexpr int kTileTokens = 64;  // positions whose sums are taken together; tiles are merged in order
constexpr int kTilePages = kTileTokens / kPageTokens;
constexpr size_t kMostHeadDim = 512;

struct Matrix {
  uint32_t kind = 0;
  const uint8_t* data = nullptr;
  size_t rows = 0, columns = 0, panel_bytes = 0, panels = 0;
  float scale = 1;              // a power of two
  const float* bias = nullptr;  // padded(rows), or null
};

// One phase's inputs: token t of `columns` values as floats, and as int8 per block of 32 with scale d, sums of 16 and 32 values.
struct Activations {
  size_t columns = 0, stride = 0, blocks = 0;
  float* f = nullptr;      // [T][stride]
  int8_t* q = nullptr;     // [T][blocks * 32]
  float* d = nullptr;      // [T][blocks]
  float* s = nullptr;      // [T][blocks]: d * sum of q
  float* s16 = nullptr;    // [T][2 * blocks]: d * sum of each half
  int32_t* i = nullptr;    // [T][blocks]: sum of q
  int32_t* i16 = nullptr;  // [T][2 * blocks]
  uint8_t* loose = nullptr;  // room for two panels of 4-bit weights with a byte each, of the calling thread alone; or null
};

// Bytes of a panel of 4-bit weights with a byte each, scales and minimums as floats behind each block.
inline constexpr size_t loose_room(size_t columns) {
  return columns / kBlockColumns * kPanelRows * (kBlockColumns + 4 * sizeof(float));
}

struct Output {
  float* y = nullptr;  // [T][stride]
  size_t stride = 0;
  bool add = false;  // to what is there
};

// Where keys and values of one layer lie: [pages][kv_heads][...]. K of a page and head is [D][16 tokens], V is [16 tokens][padded D].
struct KvPlane {
  uint32_t type = kKvF16;
  uint8_t *k = nullptr, *v = nullptr;
  uint8_t *k_scale = nullptr, *v_scale = nullptr;  // int8: float16 [pages][kv_heads][16]
  size_t kv_heads = 0, head_dim = 0, pages = 0;
};

// One tile of at most 64 positions as `group` query heads see it.
struct Tile {
  const int32_t* pages = nullptr;  // kTilePages of them, those outside of low .. high unread
  int low = 0, high = 0;           // positions of the tile that are seen
  const int32_t* ahead = nullptr;  // pages of the tile that comes next, -1: none; fetched into the cache meanwhile
};

// Running softmax of `group` query heads: best score, sum of weights, weighted values [group][padded D].
struct Softmax {
  float* best = nullptr;
  float* sum = nullptr;
  float* values = nullptr;
};

struct Kernels {
  const char* name;

  // Panels first .. first + count - 1 of y = (x W^T) * scale + bias, for tokens of the step; with `add`, y += that.
  void (*matmul)(const Matrix& w, const Activations& x, size_t tokens, size_t first, size_t count, const Output& out);

  // y = activation(x Wg^T + bg) * (x Wu^T + bu); without a gate (null) activation(x Wu^T + bu).
  void (*feed)(const Matrix* gate, const Matrix& up, uint32_t activation, const Activations& x, size_t tokens, size_t first,
               size_t count, const Output& out);

  // out = x / sqrt(mean(x^2) + epsilon) * weight; n values.
  void (*rms_norm)(const float* x, const float* weight, size_t n, float epsilon, float* out);

  // The int8 form of token t's floats.
  void (*quantise)(const Activations& x, size_t t);

  // Pairs (x[i], x[i + half]) of a head are turned.
  void (*rotate)(float* x, const float* cosine, const float* sine, size_t half);

  // One token's key and value of one head into slot `slot` of `page`. NaN stays NaN.
  void (*write_kv)(const KvPlane& plane, size_t head, size_t page, size_t slot, const float* k, const float* v);

  // The tile's own softmax over its visible positions: q [group][padded D], scaled already. `scores` is scratch, [group][64].
  void (*attend)(const KvPlane& plane, size_t head, const Tile& tile, const float* q, size_t group, float* scores, const Softmax& out);

  // total = total and `tile` together, in this order.
  void (*merge)(const Softmax& total, const Softmax& tile, size_t group, size_t head_dim);

  // Row `row` of a packed matrix as floats times `scale`, rounded as in cavectl_unpack.
  void (*unpack_row)(const Matrix& w, size_t row, float scale, float* out);
};

// The best one that this machine runs ("" as a name), or the one named; null when there is no such.
const Kernels* choose_kernels(const char* name);

// Names of those that this machine runs, best first.
int list_kernels(const char** names, int room);

}  // namespace cavectl
