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

// Sums over the blocks of one panel for tokens t .. t + M - 1, block after block.
template <uint32_t kKind, int M>
static inline void panel_sums(const uint8_t* panel, const Activations& x, size_t t, V16 (&sums)[M]) {
  constexpr KindInfo kInfo = kKindInfo[kKind];
  constexpr int kGroups = kInfo.bits == 4 ? 4 : 8;
  constexpr int kTake = kInfo.offset - (kInfo.bits == 8 ? kDot8Bias : 0);
  constexpr size_t kBytes = block_bytes(kKind), kScalesAt = kPanelRows * kBlockColumns * kInfo.bits / 8;
  const int8_t* q[M];
  for (int m = 0; m < M; ++m) {
    q[m] = x.q + (t + m) * x.blocks * kBlockColumns;
    sums[m] = splat(0.0f);
  }
  for (size_t b = 0; b < x.blocks; ++b, panel += kBytes) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + kScalesAt);
    if constexpr (M <= 4) {  // few tokens: weights come from memory, and the hardware alone fetches them a tenth slower
      for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(panel + kPrefetchBytes + line);
    }
    for (int part = 0; part < kInfo.scales; ++part) {
      V16i dots[M];
      const int from = part * kGroups / kInfo.scales, to = (part + 1) * kGroups / kInfo.scales;
      if constexpr (kInfo.bits == 4) {
        dot4<M>(panel, from, to, q, dots);
      } else {
        dot8<M>(panel, from, to, q, dots);
      }
      const V16 scale = load_f16(scales + kPanelRows * part);
      V16 minimum = splat(0.0f);
      if constexpr (kInfo.minimums) minimum = load_f16(scales + kPanelRows * (kInfo.scales + part));
      for (int m = 0; m < M; ++m) {
        const size_t at = (t + m) * x.blocks + b;
        if constexpr (kTake != 0) {
          dots[m] = add_i(dots[m], splat_i(-kTake * (kInfo.scales == 1 ? x.i[at] : x.i16[2 * at + part])));
        }
        sums[m] = fma(to_float(dots[m]), mul(scale, splat(x.d[at])), sums[m]);
        if constexpr (kInfo.minimums) sums[m] = fma(minimum, splat(kInfo.scales == 1 ? x.s[at] : x.s16[2 * at + part]), sums[m]);
      }
    }
    for (int m = 0; m < M; ++m) q[m] += kBlockColumns;
  }
}

template <uint32_t kKind>
static inline V16 load_weights(const uint8_t* at) {
  if constexpr (kKind == kF32) return load(reinterpret_cast<const float*>(at));
  if constexpr (kKind == kF16) return load_f16(reinterpret_cast<const uint16_t*>(at));
  return load_bf16(reinterpret_cast<const uint16_t*>(at));
}

template <uint32_t kKind, int M>
static inline void panel_sums_float(const uint8_t* panel, const Activations& x, size_t t, V16 (&sums)[M]) {
  constexpr size_t kBytes = kPanelRows * kKindInfo[kKind].bits / 8;
  const float* f[M];
  for (int m = 0; m < M; ++m) {
    f[m] = x.f + (t + m) * x.stride;
    sums[m] = splat(0.0f);
  }
  for (size_t k = 0; k < x.columns; ++k, panel += kBytes) {
    const V16 w = load_weights<kKind>(panel);
    for (int m = 0; m < M; ++m) sums[m] = fma(w, splat(f[m][k]), sums[m]);
  }
}

template <uint32_t kKind, int M>
static inline void product(const Matrix& w, size_t panel, const Activations& x, size_t t, V16 (&y)[M]) {
  const uint8_t* at = w.data + panel * w.panel_bytes;
  if constexpr (is_integer(kKind)) {
    panel_sums<kKind, M>(at, x, t, y);
  } else {
    panel_sums_float<kKind, M>(at, x, t, y);
  }
  const V16 scale = splat(w.scale), bias = w.bias ? load(w.bias + panel * kPanelRows) : splat(0.0f);
  for (int m = 0; m < M; ++m) y[m] = w.bias ? add(mul(y[m], scale), bias) : mul(y[m], scale);
}

template <uint32_t kKind, int M>
static void matmul_tile(const Matrix& w, const Activations& x, size_t t, size_t first, size_t count, const Output& out) {
  for (size_t panel = first; panel < first + count; ++panel) {
    V16 y[M];
    product<kKind, M>(w, panel, x, t, y);
    for (int m = 0; m < M; ++m) {
      float* at = out.y + (t + m) * out.stride + panel * kPanelRows;
      store(at, out.add ? add(load(at), y[m]) : y[m]);
    }
  }
}

// Calls tile(t, integral constant M) over all tokens, in tiles of kTokenTile and one of what is left.
template <typename F>
static inline void over_tiles(size_t tokens, const F& tile) {
  size_t t = 0;
  for (; t + kTokenTile <= tokens; t += kTokenTile) tile(t, Count<kTokenTile>{});
  switch (tokens - t) {
    case 1: tile(t, Count<1>{}); break;
    case 2: tile(t, Count<2>{}); break;
    case 3: tile(t, Count<3>{}); break;
    case 4: tile(t, Count<4>{}); break;
    case 5: tile(t, Count<5>{}); break;
    case 6: tile(t, Count<6>{}); break;
    case 7: tile(t, Count<7>{}); break;
    default: break;
  }
}

// Calls f(integral constant kind).
template <typename F>
static inline void with_kind(uint32_t kind, const F& f) {
  switch (kind) {
    case kF32: f(KindOf<kF32>{}); break;
    case kF16: f(KindOf<kF16>{}); break;
    case kBF16: f(KindOf<kBF16>{}); break;
    case kQ4_S: f(KindOf<kQ4_S>{}); break;
    case kQ4_M: f(KindOf<kQ4_M>{}); break;
    case kQ4_M16: f(KindOf<kQ4_M16>{}); break;
    case kQ8_S: f(KindOf<kQ8_S>{}); break;
    case kQ8_M: f(KindOf<kQ8_M>{}); break;
    case kQ8_S16: f(KindOf<kQ8_S16>{}); break;
    default: break;
  }
}

static void matmul(const Matrix& w, const Activations& x, size_t tokens, size_t first, size_t count, const Output& out) {
  with_kind(w.kind, [&](auto kind) {
    over_tiles(tokens, [&](size_t t, auto m) { matmul_tile<decltype(kind)::value, decltype(m)::value>(w, x, t, first, count, out); });
  });
}

// The products of up to kTokenTile tokens with one panel, whatever the kind; for the gated layer, whose two matrices may differ.
template <int M>
static inline void product_of(const Matrix& w, size_t panel, const Activations& x, size_t t, V16 (&y)[M]) {
  with_kind(w.kind, [&](auto kind) { product<decltype(kind)::value, M>(w, panel, x, t, y); });
}

static void feed(const Matrix* gate, const Matrix& up, uint32_t activation, const Activations& x, size_t tokens, size_t first,
                 size_t count, const Output& out) {
  over_tiles(tokens, [&](size_t t, auto m) {
    constexpr int M = decltype(m)::value;
    for (size_t panel = first; panel < first + count; ++panel) {
      V16 g[M], u[M];
      product_of<M>(up, panel, x, t, u);
      if (gate) product_of<M>(*gate, panel, x, t, g);
      for (int i = 0; i < M; ++i) {
        const V16 y = gate ? mul(activate(activation, g[i]), u[i]) : activate(activation, u[i]);
        store(out.y + (t + i) * out.stride + panel * kPanelRows, y);
      }
    }
  });
}

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

// --- cache ------------------------------------------------------------------------------------------------------------------------

template <uint32_t kType>
struct Kv;

template <>
struct Kv<kKvF32> {
  using Item = float;
  static V16 take(const Item* p) { return load(p); }
  static void put(Item* p, V16 x) { store(p, x); }
};

template <>
struct Kv<kKvF16> {
  using Item = uint16_t;
  static V16 take(const Item* p) { return load_f16(p); }
  static void put(Item* p, V16 x) { store_f16(p, x); }
};

template <>
struct Kv<kKvInt8> {
  using Item = int8_t;
  static V16 take(const Item* p) { return load_i8(p); }
  static void put(Item* p, V16 x) { store_i8(p, to_int(x)); }
};

template <typename F>
static inline void with_kv(uint32_t type, const F& f) {
  switch (type) {
    case kKvF32: f(KindOf<kKvF32>{}); break;
    case kKvF16: f(KindOf<kKvF16>{}); break;
    default: f(KindOf<kKvInt8>{}); break;
  }
}

// The float16 scale of n values, and what to divide by: max |x| / 127, NaN when a value is NaN, infinite when one is.
static inline float int8_scale(const float* x, size_t n, uint16_t* stored) {
  float most = 0;
  for (size_t i = 0; i < n; ++i) {
    const float size = x[i] < 0 ? -x[i] : x[i];
    most = size > most || size != size ? size : most;
    if (most != most) break;
  }
  uint16_t scales[16];
  store_f16(scales, splat(most / 127.0f));
  *stored = scales[0];
  float back[16];
  store(back, load_f16(scales));
  return back[0];
}

// n values as the plane keeps them, in `out` (padded(n) items).
template <uint32_t kType>
static inline void convert(const float* x, size_t n, typename Kv<kType>::Item* out, uint16_t* scale) {
  float divisor = 1;
  if constexpr (kType == kKvInt8) divisor = int8_scale(x, n, scale);
  for (size_t i = 0; i < n; i += 16) {
    float lanes[16] = {};
    for (size_t j = 0; j < 16 && i + j < n; ++j) lanes[j] = x[i + j];
    V16 value = load(lanes);
    if constexpr (kType == kKvInt8) {
      value = divisor > 0 ? min(splat(127.0f), max(splat(-127.0f), div(value, splat(divisor)))) : splat(0.0f);
    }
    Kv<kType>::put(out + i, value);
  }
}

template <uint32_t kType>
static void write_kv_as(const KvPlane& plane, size_t head, size_t page, size_t slot, const float* k, const float* v) {
  using Item = typename Kv<kType>::Item;
  const size_t d = plane.head_dim, width = padded(d), at = page * plane.kv_heads + head;
  Item* keys = reinterpret_cast<Item*>(plane.k) + at * d * kPageTokens;
  Item* values = reinterpret_cast<Item*>(plane.v) + at * width * kPageTokens;
  uint16_t* k_scale = kType == kKvInt8 ? reinterpret_cast<uint16_t*>(plane.k_scale) + at * kPageTokens + slot : nullptr;
  uint16_t* v_scale = kType == kKvInt8 ? reinterpret_cast<uint16_t*>(plane.v_scale) + at * kPageTokens + slot : nullptr;
  Item converted[kMostHeadDim];
  convert<kType>(k, d, converted, k_scale);
  for (size_t i = 0; i < d; ++i) keys[i * kPageTokens + slot] = converted[i];
  convert<kType>(v, d, values + slot * width, v_scale);
}

static void write_kv(const KvPlane& plane, size_t head, size_t page, size_t slot, const float* k, const float* v) {
  with_kv(plane.type, [&](auto type) { write_kv_as<decltype(type)::value>(plane, head, page, slot, k, v); });
}

// --- attention ----------------------------------------------------------------------------------------------------------------------

static inline V16 scales_of(const uint8_t* scales, const KvPlane& plane, int32_t page, size_t head) {
  return load_f16(reinterpret_cast<const uint16_t*>(scales) + (size_t(page) * plane.kv_heads + head) * kPageTokens);
}

// Scores of G query heads with the positions of kScorePages pages from `first` on, those outside low .. high - 1 minus infinity.
template <uint32_t kType, int G>
static inline void score_pages(const KvPlane& plane, size_t head, const Tile& tile, int first, const float* q, float* scores) {
  using Item = typename Kv<kType>::Item;
  const size_t d = plane.head_dim, width = padded(d);
  const Item* keys[kScorePages];
  int in_use = -1;
  for (int p = 0; p < kScorePages; ++p) {
    const int low = (first + p) * kPageTokens;
    if (tile.high > low && tile.low < low + kPageTokens) in_use = first + p;
  }
  for (int p = 0; p < kScorePages; ++p) {  // a page that nobody sees may not be there: another stands in for it
    const int low = (first + p) * kPageTokens;
    const int page = tile.high > low && tile.low < low + kPageTokens ? first + p : in_use;
    keys[p] = page < 0 ? nullptr : reinterpret_cast<const Item*>(plane.k) + (size_t(tile.pages[page]) * plane.kv_heads + head) * d * kPageTokens;
  }
  V16 sums[kScorePages][G];
  for (int p = 0; p < kScorePages; ++p) {
    for (int g = 0; g < G; ++g) sums[p][g] = splat(0.0f);
  }
  if (in_use >= 0) {
    for (size_t i = 0; i < d; ++i) {
      V16 k[kScorePages];
      for (int p = 0; p < kScorePages; ++p) k[p] = Kv<kType>::take(keys[p] + i * kPageTokens);
      for (int g = 0; g < G; ++g) {
        const V16 value = splat(q[g * width + i]);
        for (int p = 0; p < kScorePages; ++p) sums[p][g] = fma(k[p], value, sums[p][g]);
      }
    }
  }
  for (int p = 0; p < kScorePages; ++p) {
    const int start = (first + p) * kPageTokens;
    const int low = tile.low > start ? tile.low - start : 0;
    const int high = tile.high - start < kPageTokens ? tile.high - start : kPageTokens;
    V16 scale = splat(1.0f);
    if (kType == kKvInt8 && high > low) scale = scales_of(plane.k_scale, plane, tile.pages[first + p], head);
    for (int g = 0; g < G; ++g) {
      const V16 score = kType == kKvInt8 ? mul(sums[p][g], scale) : sums[p][g];
      store(scores + g * kTileTokens + start, high > low ? keep_lanes(score, low, high, -kInfinity) : splat(-kInfinity));
    }
  }
}

// Weights in place of the scores of one head; returns their sum, and the best score.
static inline float weigh(float* scores, float* best) {
  const V16 a = load(scores), b = load(scores + 16), c = load(scores + 32), e = load(scores + 48);
  *best = reduce_max(max(max(a, b), max(c, e)));
  const V16 most = splat(*best);
  const V16 wa = exponential(sub(a, most)), wb = exponential(sub(b, most)), wc = exponential(sub(c, most)), we = exponential(sub(e, most));
  store(scores, wa);
  store(scores + 16, wb);
  store(scores + 32, wc);
  store(scores + 48, we);
  return reduce_add(add(add(wa, wb), add(wc, we)));
}

// Columns at .. at + 16 C - 1 of the weighted values, position after position.
template <uint32_t kType, int G, int C>
static inline void mix(const KvPlane& plane, size_t head, const Tile& tile, const float* weights, size_t at, float* out) {
  using Item = typename Kv<kType>::Item;
  const size_t width = padded(plane.head_dim);
  V16 sums[G][C];
  for (int g = 0; g < G; ++g) {
    for (int c = 0; c < C; ++c) sums[g][c] = splat(0.0f);
  }
  for (int t = tile.low; t < tile.high;) {
    const int page = t / kPageTokens, end = (page + 1) * kPageTokens < tile.high ? (page + 1) * kPageTokens : tile.high;
    const Item* values = reinterpret_cast<const Item*>(plane.v) +
                         ((size_t(tile.pages[page]) * plane.kv_heads + head) * kPageTokens + size_t(t % kPageTokens)) * width + at;
    for (; t < end; ++t, values += width) {
      V16 v[C];
      for (int c = 0; c < C; ++c) v[c] = Kv<kType>::take(values + 16 * c);
      for (int g = 0; g < G; ++g) {
        const V16 weight = splat(weights[g * kTileTokens + t]);
        for (int c = 0; c < C; ++c) sums[g][c] = fma(v[c], weight, sums[g][c]);
      }
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int c = 0; c < C; ++c) store(out + g * width + at + 16 * c, sums[g][c]);
  }
}

template <uint32_t kType, int G>
static void attend_heads(const KvPlane& plane, size_t head, const Tile& tile, const float* q, float* scores, const Softmax& out) {
  const size_t width = padded(plane.head_dim);
  for (int first = 0; first < kTilePages; first += kScorePages) score_pages<kType, G>(plane, head, tile, first, q, scores);
  for (int g = 0; g < G; ++g) out.sum[g] = weigh(scores + g * kTileTokens, out.best + g);
  if constexpr (kType == kKvInt8) {
    for (int p = tile.low / kPageTokens; p * kPageTokens < tile.high; ++p) {
      const V16 scale = scales_of(plane.v_scale, plane, tile.pages[p], head);
      for (int g = 0; g < G; ++g) {
        float* at = scores + g * kTileTokens + p * kPageTokens;
        store(at, mul(load(at), scale));
      }
    }
  }
  size_t at = 0;
  for (; at + 16 * kValueChunks <= width; at += 16 * kValueChunks) {
    mix<kType, G, kValueChunks>(plane, head, tile, scores, at, out.values);
  }
  for (; at < width; at += 16) mix<kType, G, 1>(plane, head, tile, scores, at, out.values);
}

static void attend(const KvPlane& plane, size_t head, const Tile& tile, const float* q, size_t group, float* scores, const Softmax& out) {
  const size_t width = padded(plane.head_dim);
  with_kv(plane.type, [&](auto type) {
    constexpr uint32_t kType = decltype(type)::value;
    size_t g = 0;
    while (g < group) {
      const size_t take = group - g >= 4 ? 4 : group - g;
      const Softmax part{out.best + g, out.sum + g, out.values + g * width};
      float* mine = scores + g * kTileTokens;
      switch (take) {
        case 1: attend_heads<kType, 1>(plane, head, tile, q + g * width, mine, part); break;
        case 2: attend_heads<kType, 2>(plane, head, tile, q + g * width, mine, part); break;
        case 3: attend_heads<kType, 3>(plane, head, tile, q + g * width, mine, part); break;
        default: attend_heads<kType, 4>(plane, head, tile, q + g * width, mine, part); break;
      }
      g += take;
    }
  });
}

static void merge(const Softmax& total, const Softmax& tile, size_t group, size_t head_dim) {
  const size_t width = padded(head_dim);
  for (size_t g = 0; g < group; ++g) {
    const float best = tile.best[g] > total.best[g] || tile.best[g] != tile.best[g] ? tile.best[g] : total.best[g];
    float lanes[16] = {total.best[g] - best, tile.best[g] - best};
    store(lanes, exponential(load(lanes)));
    const V16 old_share = splat(lanes[0]), new_share = splat(lanes[1]);
    total.best[g] = best;
    total.sum[g] = total.sum[g] * lanes[0] + tile.sum[g] * lanes[1];
    float *into = total.values + g * width, *from = tile.values + g * width;
    for (size_t i = 0; i < width; i += 16) store(into + i, fma(load(into + i), old_share, mul(load(from + i), new_share)));
  }
}

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
