// One kernel of a named instruction set on a caller's buffers: what the tests compare with the reference, op by op.
//
// Owned here: padding what the kernels need padded, and checking what is handed over. Not here: any arithmetic, and steps, which call
// the kernels themselves (step.cpp). Invariant: a kernel gets its inputs in the very form that a step gives them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "abi_error.h"
#include "kernels.h"

namespace cavectl {
namespace {

constexpr uint64_t kMostTokens = 1u << 20, kMostWidth = 1u << 24;

// The kernels called `isa`, handed to f, which returns a code; no memory becomes one too.
template <typename F>
int32_t with_kernels(const char* isa, char* error, const F& f) {
  const Kernels* kernels = choose_kernels(isa ? isa : "");
  if (!kernels) return fail(error, CAVECTL_INVALID, "this machine does not have that instruction set");
  try {
    return f(*kernels);
  } catch (const std::bad_alloc&) {
    return fail(error, CAVECTL_MEMORY, "the system gave no memory");
  }
}

// [count][n] to and from rows that are padded(n) apart.
std::vector<float> spread(const float* from, size_t count, size_t n) {
  std::vector<float> out(count * padded(n));
  for (size_t i = 0; i < count; ++i) std::copy_n(from + i * n, n, out.data() + i * padded(n));
  return out;
}

void gather(const std::vector<float>& from, size_t count, size_t n, float* out) {
  for (size_t i = 0; i < count; ++i) std::copy_n(from.data() + i * padded(n), n, out + i * n);
}

// The inputs of a product in all their forms.
class Inputs {
 public:
  Inputs(const Kernels& kernels, const float* x, size_t tokens, size_t columns, bool integers) : floats_(spread(x, tokens, columns)) {
    const size_t blocks = integers ? columns / kBlockColumns : 0, all = tokens * blocks;
    q_.resize(all * kBlockColumns);
    scales_.resize(4 * all);
    sums_.resize(3 * all);
    float* scales = scales_.data();
    view_ = {columns, padded(columns), blocks, floats_.data(), q_.data(), scales, scales + all, scales + 2 * all, sums_.data(),
             sums_.data() + all};
    loose_.resize(2 * loose_room(columns));
    view_.loose = loose_.data();
    for (size_t t = 0; integers && t < tokens; ++t) kernels.quantise(view_, t);
  }
  const Activations& view() const { return view_; }

 private:
  std::vector<float> floats_, scales_;
  std::vector<int8_t> q_;
  std::vector<uint8_t> loose_;
  std::vector<int32_t> sums_;
  Activations view_;
};

const char* read_matrix(const cavectl_matrix& from, uint64_t rows, uint64_t columns, std::vector<float>& bias, Matrix& out) {
  if (!is_shape(from.kind, from.rows, from.columns) || from.kind == kVectorF32) return "no matrix has this kind and shape";
  if (from.rows > kMostWidth || from.columns > kMostWidth) return "the matrix is too large for a test";
  if (from.rows != rows || from.columns != columns) return "the matrices have different shapes";
  if (from.bytes != tensor_bytes(from.kind, rows, columns)) return "the packed bytes are not as many as the shape says";
  if (from.exponent < -kMostExponent || from.exponent > kMostExponent) return "the exponent is out of range";
  out.kind = from.kind;
  out.data = static_cast<const uint8_t*>(from.data);
  out.rows = rows;
  out.columns = columns;
  out.panel_bytes = panel_bytes(from.kind, columns);
  out.panels = panels(rows);
  out.scale = std::ldexp(1.0f, -from.exponent);
  if (from.bias) bias = spread(from.bias, 1, rows);
  out.bias = from.bias ? bias.data() : nullptr;
  return nullptr;
}

const char* shape_error(uint64_t tokens, uint64_t run) {
  return tokens < 1 || tokens > kMostTokens || run < 1 ? "impossible counts of tokens or panels" : nullptr;
}

// Calls product(first panel, count) for all of `total`, `run` of them at a time, the last ones first.
template <typename F>
void over_runs(size_t total, uint64_t run, const F& product) {
  const size_t size = size_t(std::min<uint64_t>(run, total));
  for (size_t end = total; end > 0;) {
    const size_t first = (end - 1) / size * size;
    product(first, end - first);
    end = first;
  }
}

const char* plane_of(const cavectl_op_cache& cache, KvPlane& plane) {
  if (cache.type >= kKvTypes || cache.head_dim < 1 || cache.head_dim > kMostHeadDim || cache.kv_heads < 1 ||
      cache.kv_heads > kMostWidth || cache.pages > INT32_MAX) {
    return "no cache has this type and shape";
  }
  plane = {cache.type, static_cast<uint8_t*>(cache.k), static_cast<uint8_t*>(cache.v), static_cast<uint8_t*>(cache.k_scale),
           static_cast<uint8_t*>(cache.v_scale), size_t(cache.kv_heads), cache.head_dim, size_t(cache.pages)};
  return nullptr;
}

// What one query sees of a cache, and the memory it takes to look.
struct Look {
  const Kernels& kernels;
  const KvPlane& plane;
  std::vector<int32_t> pages;  // as many as whole tiles need
  size_t first, end;           // positions

  void head(size_t head, const float* q, size_t group, float* out) const {
    const size_t width = padded(plane.head_dim);
    std::vector<float> scores(group * kTileTokens), best(2 * group, -INFINITY), sum(2 * group), values(2 * group * width);
    const Softmax total{best.data(), sum.data(), values.data()};
    const Softmax part{best.data() + group, sum.data() + group, values.data() + group * width};
    for (size_t start = first / kTileTokens * kTileTokens; start < end; start += kTileTokens) {
      const int low = int(std::max(first, start) - start), high = int(std::min<size_t>(end - start, kTileTokens));
      const Tile tile{pages.data() + start / kPageTokens, low, high};
      kernels.attend(plane, head, tile, q, group, scores.data(), part);
      kernels.merge(total, part, group, plane.head_dim);
    }
    for (size_t g = 0; g < group; ++g) {
      for (size_t i = 0; i < plane.head_dim; ++i) out[g * plane.head_dim + i] = values[g * width + i] / sum[g];
    }
  }
};

}  // namespace
}  // namespace cavectl

using namespace cavectl;

int32_t cavectl_op_quantise(const char* isa, const float* x, uint64_t tokens, uint64_t columns, int8_t* q, float* scales, char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    if (shape_error(tokens, 1) || !columns || columns > kMostWidth || columns % kBlockColumns) {
      return fail(error, CAVECTL_INVALID, "columns must be a multiple of 32");
    }
    const Inputs inputs(kernels, x, tokens, columns, true);
    std::copy_n(inputs.view().q, tokens * columns, q);
    std::copy_n(inputs.view().d, tokens * columns / kBlockColumns, scales);
    return 0;
  });
}

int32_t cavectl_op_matmul(const char* isa, const cavectl_matrix* w, const float* x, uint64_t tokens, uint64_t run, int32_t add, float* y,
                          char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    Matrix matrix;
    std::vector<float> bias;
    const char* wrong = shape_error(tokens, run);
    if (!wrong) wrong = read_matrix(*w, w->rows, w->columns, bias, matrix);
    if (wrong) return fail(error, CAVECTL_INVALID, wrong);
    const Inputs inputs(kernels, x, tokens, matrix.columns, is_integer(matrix.kind));
    std::vector<float> out = spread(y, tokens, matrix.rows);
    const Output into{out.data(), padded(matrix.rows), add != 0};
    over_runs(matrix.panels, run,
              [&](size_t first, size_t count) { kernels.matmul(matrix, inputs.view(), tokens, first, count, into); });
    gather(out, tokens, matrix.rows, y);
    return 0;
  });
}

int32_t cavectl_op_feed(const char* isa, const cavectl_matrix* gate, const cavectl_matrix* up, uint32_t activation, const float* x,
                        uint64_t tokens, uint64_t run, float* y, char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    Matrix gates, ups;
    std::vector<float> gate_bias, up_bias;
    const char* wrong = activation >= kActivations ? "there is no such activation" : shape_error(tokens, run);
    if (!wrong) wrong = read_matrix(*up, up->rows, up->columns, up_bias, ups);
    if (!wrong && gate) wrong = read_matrix(*gate, up->rows, up->columns, gate_bias, gates);
    if (wrong) return fail(error, CAVECTL_INVALID, wrong);
    const Inputs inputs(kernels, x, tokens, ups.columns, is_integer(ups.kind) || (gate && is_integer(gates.kind)));
    std::vector<float> out(tokens * padded(ups.rows));
    const Output into{out.data(), padded(ups.rows), false};
    over_runs(ups.panels, run, [&](size_t first, size_t count) {
      kernels.feed(gate ? &gates : nullptr, ups, activation, inputs.view(), tokens, first, count, into);
    });
    gather(out, tokens, ups.rows, y);
    return 0;
  });
}

int32_t cavectl_op_rms_norm(const char* isa, const float* x, const float* weight, uint64_t tokens, uint64_t columns, float epsilon,
                            float* y, char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    if (shape_error(tokens, 1) || !columns || columns > kMostWidth) return fail(error, CAVECTL_INVALID, "impossible counts");
    const std::vector<float> from = spread(x, tokens, columns), weights = spread(weight, 1, columns);
    std::vector<float> out(from.size());
    for (size_t at = 0; at < from.size(); at += padded(columns)) {
      kernels.rms_norm(from.data() + at, weights.data(), columns, epsilon, out.data() + at);
    }
    gather(out, tokens, columns, y);
    return 0;
  });
}

int32_t cavectl_op_rotate(const char* isa, float* x, const float* cosine, const float* sine, uint64_t half, char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    kernels.rotate(x, cosine, sine, half);
    return 0;
  });
}

int32_t cavectl_op_write_kv(const char* isa, const cavectl_op_cache* cache, uint64_t page, uint64_t slot, const float* k, const float* v,
                            char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    KvPlane plane;
    if (const char* wrong = plane_of(*cache, plane)) return fail(error, CAVECTL_INVALID, wrong);
    if (page >= plane.pages || slot >= uint64_t(kPageTokens)) return fail(error, CAVECTL_INVALID, "the slot is outside the cache");
    for (size_t head = 0; head < plane.kv_heads; ++head) {
      kernels.write_kv(plane, head, page, slot, k + head * plane.head_dim, v + head * plane.head_dim);
    }
    return 0;
  });
}

int32_t cavectl_op_attend(const char* isa, const cavectl_op_cache* cache, const int32_t* pages, uint64_t page_count, uint64_t position,
                          uint64_t window, const float* q, uint64_t group, float scale, float* out, char* error) {
  return with_kernels(isa, error, [&](const Kernels& kernels) -> int32_t {
    KvPlane plane;
    if (const char* wrong = plane_of(*cache, plane)) return fail(error, CAVECTL_INVALID, wrong);
    if (!group || group > 64 || position >= page_count * kPageTokens || page_count > INT32_MAX) {
      return fail(error, CAVECTL_INVALID, "impossible group, or too few pages for the position");
    }
    const size_t first = window && position + 1 > window ? position + 1 - window : 0;
    Look look{kernels, plane, {pages, pages + page_count}, first, position + 1};
    for (size_t t = look.first; t < look.end; ++t) {
      const int32_t page = pages[t / kPageTokens];
      if (page < 0 || size_t(page) >= plane.pages) return fail(error, CAVECTL_INVALID, "a page is outside the cache");
    }
    look.pages.resize((page_count + kTilePages - 1) / kTilePages * kTilePages, -1);
    const size_t d = plane.head_dim;
    std::vector<float> queries = spread(q, plane.kv_heads * group, d);
    for (float& value : queries) value *= scale;
    for (size_t head = 0; head < plane.kv_heads; ++head) {
      look.head(head, queries.data() + head * group * padded(d), group, out + head * group * d);
    }
    return 0;
  });
}
