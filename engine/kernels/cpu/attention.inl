// The cache's keys and values, and attention over a tile of them: part of kernels.inl.
//
// Owned here: how keys and values are stored, a tile's softmax, and how tiles are merged. Invariant: the sums of a tile run over its
// positions in order, whoever computes it and whatever other queries go with it.

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
  const Item* next[kScorePages];
  for (int p = 0; p < kScorePages; ++p) {  // prefetching what is there already costs nothing
    const int32_t page = tile.ahead ? tile.ahead[first + p] : -1;
    next[p] = page < 0 ? keys[p] : reinterpret_cast<const Item*>(plane.k) + (size_t(page) * plane.kv_heads + head) * d * kPageTokens;
  }
  V16 sums[kScorePages][G];
  for (int p = 0; p < kScorePages; ++p) {
    for (int g = 0; g < G; ++g) sums[p][g] = splat(0.0f);
  }
  if (in_use >= 0) {
    for (size_t i = 0; i < d; ++i) {
      V16 k[kScorePages];
      for (int p = 0; p < kScorePages; ++p) {
        k[p] = Kv<kType>::take(keys[p] + i * kPageTokens);
        __builtin_prefetch(next[p] + i * kPageTokens);
      }
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
    const int32_t ahead = tile.ahead && at == 0 ? tile.ahead[page] : -1;
    const ptrdiff_t further = ahead < 0 ? 0 : (ptrdiff_t(ahead) - tile.pages[page]) * ptrdiff_t(plane.kv_heads * kPageTokens * width);
    for (; t < end; ++t, values += width) {
      if (ahead >= 0) {
        for (size_t i = 0; i < width; i += 64 / sizeof(Item)) __builtin_prefetch(values + further + i);
      }
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
  constexpr int kChunks = value_chunks(G);
  for (; at + 16 * kChunks <= width; at += 16 * kChunks) mix<kType, G, kChunks>(plane, head, tile, scores, at, out.values);
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

