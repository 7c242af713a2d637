// The kernels, once for every instruction set: included by isa_<name>.cpp inside a namespace of its own, after simd_<name>.h.
//
// Owned here: each float formula and the order of its sums. Nothing here may depend on how many tokens or panels a call has.

namespace {

constexpr float kNaN = __builtin_nanf("");
constexpr float kInfinity = __builtin_inff();
constexpr size_t kPrefetchBytes = 1024;

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

template <uint32_t kKind>
struct KindOf {
  static constexpr uint32_t value = kKind;
};

// e^x: x = n ln 2 + r, a polynomial of degree 6 in r, times 2^n. Within 2 units in the last place; 0 below -87, NaN stays NaN.
static inline V16 exponential(V16 x) {
  const V16 inside = min(splat(88.0f), max(splat(-87.0f), x));  // the second operand wins where one is NaN
  const V16i n = to_int(mul(inside, splat(1.44269504f)));
  const V16 whole = to_float(n);
  V16 r = fma(whole, splat(-0.693145752f), inside);
  r = fma(whole, splat(-1.42860677e-6f), r);
  V16 p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_below(scale_by_power(p, n), x, -87.0f);
}

static inline V16 activate(uint32_t activation, V16 x) {
  switch (activation) {
    case kSilu:
      return div(x, add(splat(1.0f), exponential(sub(splat(0.0f), max(splat(-87.0f), x)))));
    case kRelu: {
      float lanes[16];
      store(lanes, x);
      for (float& value : lanes) value = value < 0 ? 0 : value;
      return load(lanes);
    }
    default: {
      float lanes[16];
      store(lanes, x);
      for (float& value : lanes) {
        const double v = value;
        value = activation == kGelu ? float(0.5 * v * (1.0 + erf(v * 0.70710678118654752)))
                                    : float(0.5 * v * (1.0 + tanh(0.79788456080286536 * (v + 0.044715 * v * v * v))));
      }
      return load(lanes);
    }
  }
}

#include "matmul.inl"

static void rms_norm(const float* x, const float* weight, size_t n, float epsilon, float* out) {
  V16 squares = splat(0.0f);
  for (size_t i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const V16 inverse = splat(1.0f / sqrtf(reduce_add(squares) / float(n) + epsilon));
  for (size_t i = 0; i < n; i += 16) store(out + i, mul(mul(load(x + i), inverse), load(weight + i)));
}

static void quantise(const Activations& x, size_t t) {
  const float* f = x.f + t * x.stride;
  int8_t* q = x.q + t * x.blocks * kBlockColumns;
  for (size_t b = 0; b < x.blocks; ++b, f += kBlockColumns, q += kBlockColumns) {
    const V16 first = load(f), second = load(f + 16);
    const V16 nan = add(sub(first, first), sub(second, second));
    const float most = reduce_max(max(absolute(first), absolute(second)));
    const size_t at = t * x.blocks + b;
    const float wrong = reduce_add(nan);  // 0, or NaN when a value is NaN or infinite
    const bool empty = !(most > 1e-30f) || wrong != 0;
    const V16 inverse = splat(empty ? 0.0f : 127.0f / most);
    const V16i a = empty ? zero_i() : to_int(mul(first, inverse)), c = empty ? zero_i() : to_int(mul(second, inverse));
    store_i8(q, a);
    store_i8(q + 16, c);
    const int32_t low = reduce_add_i(a), high = reduce_add_i(c);
    const float d = wrong != 0 ? kNaN : empty ? 0.0f : most / 127.0f;
    x.d[at] = d;
    x.i[at] = low + high;
    x.i16[2 * at] = low;
    x.i16[2 * at + 1] = high;
    x.s[at] = d * float(low + high);
    x.s16[2 * at] = d * float(low);
    x.s16[2 * at + 1] = d * float(high);
  }
}

static void rotate(float* x, const float* cosine, const float* sine, size_t half) {
  for (size_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

#include "attention.inl"

// --- embedding ----------------------------------------------------------------------------------------------------------------------

static inline float half_value(const uint8_t* at) {
  uint16_t halves[16] = {};
  __builtin_memcpy(halves, at, 2);
  float lanes[16];
  store(lanes, load_f16(halves));
  return lanes[0];
}

// Column c of lane `lane` of an integer block, without its offset.
static inline int stored_number(uint32_t kind, const uint8_t* block, size_t lane, size_t c) {
  if (kKindInfo[kind].bits == 8) return block[64 * (c / 4) + 4 * lane + c % 4];
  const uint8_t byte = block[64 * (c / 8) + 4 * lane + c % 4];
  return c % 8 < 4 ? byte & 15 : byte >> 4;
}

static void unpack_row(const Matrix& w, size_t row, float scale, float* out) {
  const uint8_t* at = w.data + row / kPanelRows * w.panel_bytes;
  const size_t lane = row % kPanelRows;
  const KindInfo& info = kKindInfo[w.kind];
  if (!is_integer(w.kind)) {
    const size_t bytes = info.bits / 8;
    for (size_t k = 0; k < w.columns; ++k) {
      const uint8_t* item = at + (k * kPanelRows + lane) * bytes;
      uint32_t bits = 0;
      __builtin_memcpy(&bits, item, bytes);
      if (w.kind == kBF16) bits <<= 16;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      out[k] = (w.kind == kF16 ? half_value(item) : value) * w.scale * scale;
    }
    return;
  }
  for (size_t b = 0; b < w.columns / kBlockColumns; ++b, at += block_bytes(w.kind)) {
    const uint8_t* scales = at + kPanelRows * kBlockColumns * info.bits / 8;
    for (int part = 0; part < info.scales; ++part) {
      const float d = half_value(scales + 2 * (kPanelRows * part + lane));
      const float m = info.minimums ? half_value(scales + 2 * (kPanelRows * (info.scales + part) + lane)) : 0.0f;
      const size_t from = part * kBlockColumns / info.scales, to = (part + 1) * kBlockColumns / info.scales;
      for (size_t c = from; c < to; ++c) {
        const float value = d * float(stored_number(w.kind, at, lane, c) - info.offset);
        out[b * kBlockColumns + c] = (info.minimums ? value + m : value) * w.scale * scale;
      }
    }
  }
}

constexpr Kernels kTable = {kName, matmul, feed, rms_norm, quantise, rotate, write_kv, attend, merge, unpack_row};

}  // namespace
