// Products of packed matrices and tokens: part of kernels.inl.
//
// Owned here: what a panel of 16 rows and some tokens give, for every kind, and the gated layer. Invariant: an integer kind's sum is, block
// after block, fma(dot, scale * d, sum) and then fma(minimum, d * sum of x, sum), however the weights were unpacked.

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

// A block of 4-bit weights with a byte each, in dot8's layout, then its scales and minimums as floats.
template <uint32_t kKind>
constexpr size_t kLooseBytes = kPanelRows * (kBlockColumns + sizeof(float) * kKindInfo[kKind].scales * (kKindInfo[kKind].minimums ? 2 : 1));

template <uint32_t kKind>
static void loosen(const uint8_t* panel, size_t blocks, uint8_t* out) {
  constexpr KindInfo kInfo = kKindInfo[kKind];
  constexpr int kVectors = kInfo.scales * (kInfo.minimums ? 2 : 1);
  for (size_t b = 0; b < blocks; ++b, panel += block_bytes(kKind), out += kLooseBytes<kKind>) {
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < 64; ++i) {
        out[128 * j + i] = panel[64 * j + i] & 15;
        out[128 * j + 64 + i] = panel[64 * j + i] >> 4;
      }
    }
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + kPanelRows * kBlockColumns / 2);
    float* floats = reinterpret_cast<float*>(out + kPanelRows * kBlockColumns);
    for (int v = 0; v < kVectors; ++v) store(floats + kPanelRows * v, load_f16(halves + kPanelRows * v));
  }
}

// As panel_sums, from a panel that `loosen` made: the same numbers in the same order. Part after part of the rows goes over all
// blocks, so that sums and products together fit the registers.
template <uint32_t kKind, int M>
static inline void loose_sums(const uint8_t* panel, const Activations& x, size_t t, V16 (&sums)[M]) {
  constexpr KindInfo kInfo = kKindInfo[kKind];
  constexpr int kLanes = int(kPanelRows) / kParts;
  for (int rows = 0; rows < kParts; ++rows) {
    const uint8_t* block = panel;
    const int8_t* q[M];
    Part of[M];
    for (int m = 0; m < M; ++m) {
      q[m] = x.q + (t + m) * x.blocks * kBlockColumns;
      of[m] = splat_part(0.0f);
    }
    for (size_t b = 0; b < x.blocks; ++b, block += kLooseBytes<kKind>) {
      const float* floats = reinterpret_cast<const float*>(block + kPanelRows * kBlockColumns) + kLanes * rows;
      for (int part = 0; part < kInfo.scales; ++part) {
        PartI dots[M];
        dot_small<M>(block, rows, part * 8 / kInfo.scales, (part + 1) * 8 / kInfo.scales, q, dots);
        const Part scale = load_part(floats + kPanelRows * part);
        Part minimum = splat_part(0.0f);
        if constexpr (kInfo.minimums) minimum = load_part(floats + kPanelRows * (kInfo.scales + part));
        for (int m = 0; m < M; ++m) {
          const size_t at = (t + m) * x.blocks + b;
          if constexpr (kInfo.offset != 0) dots[m] = add_i(dots[m], splat_part_i(-kInfo.offset * x.i[at]));
          of[m] = fma(to_float(dots[m]), mul(scale, splat_part(x.d[at])), of[m]);
          if constexpr (kInfo.minimums) of[m] = fma(minimum, splat_part(kInfo.scales == 1 ? x.s[at] : x.s16[2 * at + part]), of[m]);
        }
      }
      for (int m = 0; m < M; ++m) q[m] += kBlockColumns;
    }
    for (int m = 0; m < M; ++m) set_part(sums[m], rows, of[m]);
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

template <int M>
static inline void scale_and_bias(const Matrix& w, size_t panel, V16 (&y)[M]) {
  const V16 scale = splat(w.scale), bias = w.bias ? load(w.bias + panel * kPanelRows) : splat(0.0f);
  for (int m = 0; m < M; ++m) y[m] = w.bias ? add(mul(y[m], scale), bias) : mul(y[m], scale);
}

// Whether it pays to give each 4-bit weight of a panel a byte before all tokens go over it: a property of the instruction set.
static inline bool loosens(const Matrix& w, const Activations& x, size_t tokens) {
  return tokens >= kLooseTokens && x.loose && is_integer(w.kind) && kKindInfo[w.kind].bits == 4;
}

template <uint32_t kKind>
constexpr bool kCanLoosen = is_integer(kKind) && kKindInfo[kKind].bits == 4;

template <uint32_t kKind, int M>
static inline void loose_product(const Matrix& w, size_t panel, const uint8_t* loose, const Activations& x, size_t t, V16 (&y)[M]) {
  loose_sums<kKind, M>(loose, x, t, y);
  scale_and_bias<M>(w, panel, y);
}

template <uint32_t kKind, int M>
static inline void product(const Matrix& w, size_t panel, const Activations& x, size_t t, V16 (&y)[M]) {
  const uint8_t* at = w.data + panel * w.panel_bytes;
  if constexpr (is_integer(kKind)) {
    panel_sums<kKind, M>(at, x, t, y);
  } else {
    panel_sums_float<kKind, M>(at, x, t, y);
  }
  scale_and_bias<M>(w, panel, y);
}

template <int M>
static inline void finish(size_t panel, size_t t, V16 (&y)[M], const Output& out) {
  for (int m = 0; m < M; ++m) {
    float* at = out.y + (t + m) * out.stride + panel * kPanelRows;
    store(at, out.add ? add(load(at), y[m]) : y[m]);
  }
}

template <uint32_t kKind, int M>
static void matmul_tile(const Matrix& w, const Activations& x, size_t t, size_t first, size_t count, const Output& out) {
  for (size_t panel = first; panel < first + count; ++panel) {
    V16 y[M];
    product<kKind, M>(w, panel, x, t, y);
    finish<M>(panel, t, y, out);
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

static void loosen_panel(const Matrix& w, size_t panel, const Activations& x, uint8_t* out) {
  with_kind(w.kind, [&](auto kind) {
    constexpr uint32_t kKind = decltype(kind)::value;
    if constexpr (kCanLoosen<kKind>) loosen<kKind>(w.data + panel * w.panel_bytes, x.blocks, out);
  });
}

static void matmul(const Matrix& w, const Activations& x, size_t tokens, size_t first, size_t count, const Output& out) {
  with_kind(w.kind, [&](auto kind) {
    constexpr uint32_t kKind = decltype(kind)::value;
    if constexpr (kCanLoosen<kKind>) {
      if (loosens(w, x, tokens)) {
        for (size_t panel = first; panel < first + count; ++panel) {
          loosen_panel(w, panel, x, x.loose);
          over_tiles(tokens, [&](size_t t, auto m) {
            constexpr int M = decltype(m)::value;
            V16 y[M];
            loose_product<kKind, M>(w, panel, x.loose, x, t, y);
            finish<M>(panel, t, y, out);
          });
        }
        return;
      }
    }
    over_tiles(tokens, [&](size_t t, auto m) { matmul_tile<decltype(kind)::value, decltype(m)::value>(w, x, t, first, count, out); });
  });
}

// The products of M tokens with one panel, whatever the kind; for the gated layer, whose two matrices may differ.
template <int M>
static inline void product_of(const Matrix& w, size_t panel, const uint8_t* loose, const Activations& x, size_t t, V16 (&y)[M]) {
  with_kind(w.kind, [&](auto kind) {
    constexpr uint32_t kKind = decltype(kind)::value;
    if constexpr (kCanLoosen<kKind>) {
      if (loose) {
        loose_product<kKind, M>(w, panel, loose, x, t, y);
        return;
      }
    }
    product<kKind, M>(w, panel, x, t, y);
  });
}

template <int M>
static inline void feed_tile(const Matrix* gate, const Matrix& up, uint32_t activation, size_t panel, size_t t, const Activations& x,
                             const uint8_t* loose_gate, const uint8_t* loose_up, const Output& out) {
  V16 g[M], u[M];
  product_of<M>(up, panel, loose_up, x, t, u);
  if (gate) product_of<M>(*gate, panel, loose_gate, x, t, g);
  for (int i = 0; i < M; ++i) {
    const V16 y = gate ? mul(activate(activation, g[i]), u[i]) : activate(activation, u[i]);
    store(out.y + (t + i) * out.stride + panel * kPanelRows, y);
  }
}

static void feed(const Matrix* gate, const Matrix& up, uint32_t activation, const Activations& x, size_t tokens, size_t first,
                 size_t count, const Output& out) {
  uint8_t* loose_up = loosens(up, x, tokens) ? x.loose : nullptr;
  uint8_t* loose_gate = gate && loosens(*gate, x, tokens) ? x.loose + loose_room(x.columns) : nullptr;
  if (!loose_up && !loose_gate) {  // tokens outside: a few panels stay near while all tokens go over them
    over_tiles(tokens, [&](size_t t, auto m) {
      for (size_t panel = first; panel < first + count; ++panel) {
        feed_tile<decltype(m)::value>(gate, up, activation, panel, t, x, nullptr, nullptr, out);
      }
    });
    return;
  }
  for (size_t panel = first; panel < first + count; ++panel) {
    if (loose_up) loosen_panel(up, panel, x, loose_up);
    if (loose_gate) loosen_panel(*gate, panel, x, loose_gate);
    over_tiles(tokens, [&](size_t t, auto m) {
      feed_tile<decltype(m)::value>(gate, up, activation, panel, t, x, loose_gate, loose_up, out);
    });
  }
}

