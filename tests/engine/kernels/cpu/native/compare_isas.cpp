// Compares one instruction set's kernels with the scalar ones, to the bit, on random data of odd shapes.
//
// Linked with the objects of isa_scalar.cpp and of the other isa_<name>.cpp, whose table CAVECTL_TABLE names. The other side's work is
// cut into pieces, the scalar side's is not: so that a result that depends on the cut is a difference too. NaN is equal to NaN,
// whatever its sign and payload. Prints one line and ends with 0 when all is equal, else the first differences and 1.
#include <cstdio>
#include <cstdlib>

#include "isa_random.h"

namespace cavectl {
const Kernels* kernels_scalar_table();
const Kernels* CAVECTL_TABLE();
}  // namespace cavectl

namespace compare {
namespace {

using namespace cavectl;

class Report {
 public:
  size_t values = 0, wrong = 0;

  template <typename T>
  void equal(const char* what, const std::vector<T>& expected, const std::vector<T>& found) {
    for (size_t i = 0; i < expected.size(); ++i) {
      ++values;
      if (same(expected[i], found[i]) || ++wrong > 20) continue;
      printf("%s: value %zu of %zu is %.9g, expected %.9g\n", what, i, expected.size(), double(found[i]), double(expected[i]));
    }
  }

  // The items of a cache plane, which are float32, float16 or int8.
  void equal_items(const char* what, size_t item_bytes, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& found) {
    if (item_bytes == 4) equal(what, items<float>(expected), items<float>(found));
    if (item_bytes == 2) equal_halves(what, expected, found);
    if (item_bytes == 1) equal(what, expected, found);
  }
  void equal_halves(const char* what, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& found) {
    equal(what, one_nan(items<uint16_t>(expected)), one_nan(items<uint16_t>(found)));
  }

 private:
  template <typename T>
  static bool same(T x, T y) {
    return memcmp(&x, &y, sizeof x) == 0 || (x != x && y != y);
  }
  template <typename T>
  static std::vector<T> items(const std::vector<uint8_t>& bytes) {
    std::vector<T> out(bytes.size() / sizeof(T));
    memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
    return out;
  }
  static std::vector<uint16_t> one_nan(std::vector<uint16_t> halves) {
    for (uint16_t& half : halves) half = (half & 0x7fff) > 0x7c00 ? 0x7e00 : half;
    return halves;
  }
};

struct Pair {
  const Kernels& scalar;
  const Kernels& other;
  Report& report;
  Random& random;
};

// Calls f(first, count) for random pieces of 0 .. total - 1; sometimes it is one.
template <typename F>
void in_pieces(Random& random, size_t total, const F& f) {
  for (size_t first = 0; first < total;) {
    const size_t count = random.one_in(3) ? total - first : 1 + random.below(total - first);
    f(first, count);
    first += count;
  }
}

void quantise_all(const Kernels& kernels, Inputs& x) {
  for (size_t t = 0; t < x.tokens; ++t) kernels.quantise(x.from(0), t);
}

void check_quantise(const Pair& pair) {
  for (size_t columns : {1, 16, 17, 32, 40, 64, 100, 576}) {
    Inputs expected = random_inputs(pair.random, 1 + pair.random.below(9), columns), found = expected;
    quantise_all(pair.scalar, expected);
    quantise_all(pair.other, found);
    pair.report.equal("quantise q", expected.q, found.q);
    pair.report.equal("quantise d", expected.d, found.d);
    pair.report.equal("quantise s", expected.s, found.s);
    pair.report.equal("quantise s16", expected.s16, found.s16);
    pair.report.equal("quantise i", expected.i, found.i);
    pair.report.equal("quantise i16", expected.i16, found.i16);
  }
}

size_t columns_for(Random& random, uint32_t kind) { return is_integer(kind) ? 32 * (1 + random.below(7)) : 1 + random.below(100); }

// Fills y on both sides: call(kernels, inputs, tokens, first, count, output).
template <typename F>
void compare_products(const Pair& pair, const char* what, Inputs& x, size_t panels, bool add, const F& call) {
  const size_t stride = panels * kPanelRows;
  std::vector<float> expected = wild_values(pair.random, x.tokens * stride), found = expected;
  call(pair.scalar, x.from(0), x.tokens, 0, panels, Output{expected.data(), stride, add});
  in_pieces(pair.random, x.tokens, [&](size_t t, size_t tokens) {
    in_pieces(pair.random, panels, [&](size_t first, size_t count) {
      call(pair.other, x.from(t), tokens, first, count, Output{found.data() + t * stride, stride, add});
    });
  });
  pair.report.equal(what, expected, found);
}

void check_matmul(const Pair& pair) {
  for (uint32_t kind = kF32; kind < kKinds; ++kind) {
    for (size_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 19, 40}) {
      const size_t columns = columns_for(pair.random, kind);
      const Weights w = random_weights(pair.random, kind, 1 + pair.random.below(70), columns);
      Inputs x = random_inputs(pair.random, tokens, columns);
      quantise_all(pair.scalar, x);
      compare_products(pair, "matmul", x, w.matrix.panels, pair.random.one_in(2),
                       [&](const Kernels& kernels, const Activations& in, size_t count, size_t first, size_t panels, const Output& out) {
                         kernels.matmul(w.matrix, in, count, first, panels, out);
                       });
    }
  }
}

void compare_feed(const Pair& pair, const Weights* gate, const Weights& up, uint32_t activation, Inputs& x) {
  compare_products(pair, "feed", x, up.matrix.panels, false,
                   [&](const Kernels& kernels, const Activations& in, size_t count, size_t first, size_t panels, const Output& out) {
                     kernels.feed(gate ? &gate->matrix : nullptr, up.matrix, activation, in, count, first, panels, out);
                   });
}

void check_feed(const Pair& pair) {
  for (uint32_t kind = kF32; kind < kKinds; ++kind) {
    for (uint32_t activation = 0; activation < kActivations; ++activation) {
      const size_t rows = 1 + pair.random.below(50), columns = 32 * (1 + pair.random.below(3));
      const uint32_t gate_kind = kF32 + uint32_t(pair.random.below(kKinds - kF32));
      const Weights up = random_weights(pair.random, kind, rows, columns);
      const Weights gate = random_weights(pair.random, gate_kind, rows, columns);
      Inputs x = random_inputs(pair.random, 1 + pair.random.below(24), columns);
      quantise_all(pair.scalar, x);
      compare_feed(pair, pair.random.one_in(3) ? nullptr : &gate, up, activation, x);
    }
  }
}

// Activations of numbers of every size: a matrix of one column times one.
void check_activations(const Pair& pair) {
  for (uint32_t activation = 0; activation < kActivations; ++activation) {
    Weights w = random_weights(pair.random, kF32, 4096, 1);
    w.matrix.scale = 1;
    w.matrix.bias = nullptr;
    for (size_t i = 0; i < 4096; ++i) {
      put(w.bytes, i, pair.random.one_in(3) ? pair.random.any() : pair.random.wild() * (pair.random.one_in(2) ? 1.0f : 50.0f));
    }
    Inputs x = random_inputs(pair.random, 1, 1);
    x.f[0] = 1;
    compare_feed(pair, nullptr, w, activation, x);
  }
}

void check_norm(const Pair& pair) {
  for (size_t n : {1, 8, 15, 16, 17, 64, 100, 576, 2047}) {
    for (bool wild : {false, true}) {
      std::vector<float> x(padded(n)), weight(padded(n)), expected(padded(n)), found(padded(n));
      for (size_t i = 0; i < n; ++i) {
        x[i] = wild ? pair.random.wild() : pair.random.plain();
        weight[i] = wild ? pair.random.wild() : pair.random.plain();
      }
      pair.scalar.rms_norm(x.data(), weight.data(), n, 1e-5f, expected.data());
      pair.other.rms_norm(x.data(), weight.data(), n, 1e-5f, found.data());
      pair.report.equal("rms_norm", expected, found);
    }
  }
}

void check_rotate(const Pair& pair) {
  for (size_t half : {1, 3, 8, 16, 20, 32, 64}) {
    std::vector<float> expected = wild_values(pair.random, 2 * half), found = expected;
    const std::vector<float> cosine = plain_values(pair.random, half), sine = plain_values(pair.random, half);
    pair.scalar.rotate(expected.data(), cosine.data(), sine.data(), half);
    pair.other.rotate(found.data(), cosine.data(), sine.data(), half);
    pair.report.equal("rotate", expected, found);
  }
}

void compare_caches(const Pair& pair, const Cache& expected, const Cache& found) {
  pair.report.equal_items("write_kv keys", expected.item_bytes(), expected.k, found.k);
  pair.report.equal_items("write_kv values", expected.item_bytes(), expected.v, found.v);
  pair.report.equal_halves("write_kv key scales", expected.k_scale, found.k_scale);
  pair.report.equal_halves("write_kv value scales", expected.v_scale, found.v_scale);
}

std::vector<float> head_values(Random& random, size_t n) {
  if (random.one_in(2)) return wild_values(random, n);
  std::vector<float> values = plain_values(random, n);
  const bool middle = random.one_in(2);
  for (size_t i = 0; middle && i < n; ++i) values[i] = random.middle(i == 0);
  return values;
}

void check_write(const Pair& pair) {
  for (uint32_t type = 0; type < kKvTypes; ++type) {
    for (size_t head_dim : {1, 7, 16, 20, 64, 80, 128, 512}) {
      Cache expected = random_cache(pair.random, type, 2, head_dim, 2), found = expected;
      for (int written = 0; written < 20; ++written) {
        const std::vector<float> k = head_values(pair.random, head_dim), v = head_values(pair.random, head_dim);
        const size_t head = pair.random.below(2), page = pair.random.below(2), slot = pair.random.below(kPageTokens);
        pair.scalar.write_kv(expected.plane(), head, page, slot, k.data(), v.data());
        pair.other.write_kv(found.plane(), head, page, slot, k.data(), v.data());
      }
      compare_caches(pair, expected, found);
    }
  }
}

// Every float16, what lies half way to the next one, and the float32 on each side of that.
void check_halves(const Pair& pair) {
  Cache expected = random_cache(pair.random, kKvF16, 1, 512, 1), found = expected;
  std::vector<float> values;
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const auto value = [](uint32_t h) { return ldexpf(float(h >> 10 ? 1024 + (h & 1023) : h), int(h >> 10 ? h >> 10 : 1) - 25); };
    const float middle = 0.5f * (value(half) + value(half + 1));
    for (float x : {value(half), middle, nextafterf(middle, 0), nextafterf(middle, INFINITY)}) {
      values.push_back(half % 3 ? x : -x);
    }
  }
  values.resize((values.size() + 511) / 512 * 512);
  for (size_t at = 0; at < values.size(); at += 512) {
    const size_t slot = at / 512 % kPageTokens;
    pair.scalar.write_kv(expected.plane(), 0, 0, slot, &values[at], &values[at]);
    pair.other.write_kv(found.plane(), 0, 0, slot, &values[at], &values[at]);
    if (slot == kPageTokens - 1 || at + 512 == values.size()) compare_caches(pair, expected, found);
  }
}

struct Attention {
  std::vector<float> scores, best, sum, values;
  Attention(size_t group, size_t head_dim)
      : scores(group * kTileTokens), best(group), sum(group), values(group * padded(head_dim)) {}
  Softmax softmax() { return {best.data(), sum.data(), values.data()}; }
};

void compare_attention(const Pair& pair, uint32_t type, size_t head_dim, size_t group) {
  constexpr size_t kPages = 9;
  Cache cache = random_cache(pair.random, type, 2, head_dim, kPages);
  int32_t pages[kTilePages];
  Tile tile{pages, 0, 0};
  tile.low = pair.random.one_in(2) ? 0 : int(pair.random.below(kTileTokens));
  tile.high = tile.low + 1 + int(pair.random.below(size_t(kTileTokens - tile.low)));
  for (int p = 0; p < kTilePages; ++p) {
    const bool seen = p * kPageTokens < tile.high && (p + 1) * kPageTokens > tile.low;
    pages[p] = seen ? int32_t(pair.random.below(kPages)) : INT32_MIN;
  }
  const std::vector<float> q = pair.random.one_in(4) ? wild_values(pair.random, group * padded(head_dim))
                                                     : plain_values(pair.random, group * padded(head_dim));
  Attention expected(group, head_dim), found(group, head_dim);
  const size_t head = pair.random.below(2);
  pair.scalar.attend(cache.plane(), head, tile, q.data(), group, expected.scores.data(), expected.softmax());
  pair.other.attend(cache.plane(), head, tile, q.data(), group, found.scores.data(), found.softmax());
  pair.report.equal("attend best", expected.best, found.best);
  pair.report.equal("attend sum", expected.sum, found.sum);
  pair.report.equal("attend values", expected.values, found.values);
}

void check_attention(const Pair& pair) {
  for (uint32_t type = 0; type < kKvTypes; ++type) {
    for (size_t head_dim : {1, 7, 16, 20, 64, 80, 128}) {
      for (size_t group : {1, 2, 3, 4, 5, 7, 9}) compare_attention(pair, type, head_dim, group);
    }
  }
}

// With one value a head, many heads: e^x over all that a softmax meets.
void check_merge(const Pair& pair) {
  for (size_t head_dim : {1, 16, 20, 64}) {
    const size_t group = head_dim == 1 ? 4096 : 9;
    Attention expected(group, head_dim), tile(group, head_dim);
    for (size_t g = 0; g < group; ++g) {
      expected.best[g] = pair.random.one_in(9) ? -INFINITY : pair.random.wild() * 30;
      tile.best[g] = pair.random.one_in(9) ? -INFINITY : pair.random.wild() * 30;
      expected.sum[g] = pair.random.wild();
      tile.sum[g] = pair.random.wild();
    }
    expected.values = wild_values(pair.random, expected.values.size());
    tile.values = wild_values(pair.random, tile.values.size());
    Attention found = expected;
    pair.scalar.merge(expected.softmax(), tile.softmax(), group, head_dim);
    pair.other.merge(found.softmax(), tile.softmax(), group, head_dim);
    pair.report.equal("merge best", expected.best, found.best);
    pair.report.equal("merge sum", expected.sum, found.sum);
    pair.report.equal("merge values", expected.values, found.values);
  }
}

void compare_unpacked(const Pair& pair, const Weights& w) {
  std::vector<float> expected(w.matrix.columns), found = expected;
  for (size_t row = 0; row < w.matrix.rows; ++row) {
    pair.scalar.unpack_row(w.matrix, row, 1.5f, expected.data());
    pair.other.unpack_row(w.matrix, row, 1.5f, found.data());
    pair.report.equal("unpack_row", expected, found);
  }
}

void check_unpack(const Pair& pair) {
  for (uint32_t kind = kF32; kind < kKinds; ++kind) {
    compare_unpacked(pair, random_weights(pair.random, kind, 1 + pair.random.below(40), columns_for(pair.random, kind)));
  }
  Weights halves = random_weights(pair.random, kF16, 16, 4096);  // every one of them
  for (size_t i = 0; i < 65536; ++i) put(halves.bytes, i, uint16_t(i));
  compare_unpacked(pair, halves);
}

}  // namespace
}  // namespace compare

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 1;
  const cavectl::Kernels &scalar = *cavectl::kernels_scalar_table(), &other = *cavectl::CAVECTL_TABLE();
  compare::Report report;
  for (int round = 0; round < rounds; ++round) {
    compare::Random random{uint64_t(round) + 1};
    const compare::Pair pair{scalar, other, report, random};
    for (auto check : {compare::check_quantise, compare::check_matmul, compare::check_feed, compare::check_activations,
                       compare::check_norm, compare::check_rotate, compare::check_write, compare::check_attention,
                       compare::check_merge, compare::check_unpack}) {
      check(pair);
    }
    if (round == 0) compare::check_halves(pair);
  }
  printf("%s: %zu of %zu values differ from scalar\n", other.name, report.wrong, report.values);
  return report.wrong ? 1 : 0;
}
