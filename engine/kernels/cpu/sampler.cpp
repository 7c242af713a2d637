// The sampler in C++: what engine/runtime/sampler.py says, without looking at more of a row than the answer needs.
//
// Owned here: adjustments, filters and the draw. Not here: passes over a whole row (sampler_loops.cpp), what a slot may hold
// (slot_words.cpp). A row is seen in blocks of 64 ids whose best score is known: greedy is that pass alone, and a filter looks only
// into blocks that can hold what it keeps. Invariant: the same bits on every instruction set, whoever calls and in any order.
#include "sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>

#include "sampler_loops.h"

namespace cavectl {

namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

bool changes_scores(const Slot& slot, const uint8_t* allowed) {
  const SlotParams& p = slot.params;
  return allowed || !p.bias.empty() || (p.repetition_penalty != 1 && p.repeat_last_n != 0) ||
         ((p.presence_penalty != 0 || p.frequency_penalty != 0) && !slot.counts.empty()) ||
         int64_t(slot.tokens.size() - slot.prompt_tokens) < p.min_tokens;
}

// Of a weight's exponent. Below the smallest normal number a temperature counts as that number: its inverse stays finite.
double scale_of(const SlotParams& p) { return 1 / std::max(p.temperature, DBL_MIN); }

struct Adjusted {
  double* scores;
  bool in_range = true;

  void set(int32_t id, double score) {
    scores[id] = score;
    in_range = in_range && score < -kNone;  // not NaN either
  }
};

// Each id once, however often it was said.
void penalise_repeated(const Slot& slot, std::vector<uint64_t>& seen, Adjusted& to) {
  const SlotParams& p = slot.params;
  const size_t said = slot.tokens.size(), last = p.repeat_last_n < 0 ? said : std::min(said, size_t(p.repeat_last_n));
  for (size_t i = said - last; i < said; ++i) {
    const uint32_t id = uint32_t(slot.tokens[i]);
    const uint64_t bit = uint64_t(1) << id % 64;
    if (seen[id / 64] & bit) continue;
    seen[id / 64] |= bit;
    const double score = to.scores[id];
    to.set(int32_t(id), score > 0 ? score / p.repetition_penalty : score * p.repetition_penalty);
  }
  for (size_t i = said - last; i < said; ++i) seen[uint32_t(slot.tokens[i]) / 64] = 0;
}

// Bytes of a grammar are mostly all ones or all zeros; the others are not worth a branch for each bit.
void forbid(const uint8_t* allowed, size_t n, double* scores) {
  for (size_t first = 0; first < n; first += 8) {
    const uint32_t byte = allowed[first / 8];
    if (byte == 0xff) continue;
    const size_t count = std::min<size_t>(8, n - first);
    if (byte == 0) {
      std::fill_n(scores + first, count, kNone);
      continue;
    }
    const double either[2] = {kNone, 0};  // adding is choosing: a score is never +inf here
    for (size_t i = 0; i < count; ++i) scores[first + i] += either[byte >> i & 1];
  }
}

// Bias, penalties and minimum length, in the order of SamplingParams; then the grammar. False when a score is not a number below
// infinity any more.
bool adjust(const Slot& slot, const uint8_t* allowed, size_t n, SampleScratch& scratch) {
  const SlotParams& p = slot.params;
  Adjusted to{scratch.scores.data()};
  for (const auto& [id, bias] : p.bias) to.set(id, to.scores[id] + bias);
  if (p.repetition_penalty != 1 && p.repeat_last_n != 0) {
    scratch.seen.resize(n / 64 + 1);
    penalise_repeated(slot, scratch.seen, to);
  }
  if (p.presence_penalty != 0 || p.frequency_penalty != 0) {
    for (const auto& [id, count] : slot.counts) {
      if (count) to.set(id, to.scores[id] - (p.presence_penalty + p.frequency_penalty * count));
    }
  }
  if (int64_t(slot.tokens.size() - slot.prompt_tokens) < p.min_tokens) {
    for (int32_t id : p.stop_ids) to.scores[id] = kNone;
  }
  if (allowed && to.in_range) forbid(allowed, n, to.scores);
  return to.in_range;
}

// A row of scores, float32 as computed or float64 as adjusted, with the best of each block of it.
template <typename T>
struct Scores {
  const T* row;
  size_t n;
  double best;
  const RowLoops<T>& loops;
  SampleScratch& scratch;
};

// The first id that has the best score.
template <typename T>
int32_t first_best(const Scores<T>& s) {
  const std::vector<double>& peaks = s.scratch.peaks;
  const size_t block = size_t(std::find(peaks.begin(), peaks.end(), s.best) - peaks.begin());
  const T* from = s.row + block * kBlock;
  return int32_t(std::find(from, s.row + s.n, T(s.best)) - s.row);
}

// Into scratch ids and weights: all ids, ascending, whose score is `bound` at least, and their scores.
template <typename T>
void gather(const Scores<T>& s, double bound) {
  std::vector<int32_t>& ids = s.scratch.ids;
  std::vector<double>& values = s.scratch.weights;
  size_t kept = 0;
  for (size_t block = 0; block < s.scratch.peaks.size(); ++block) {
    if (s.scratch.peaks[block] < bound) continue;
    if (ids.size() < kept + kBlock) ids.resize(2 * kept + kBlock);
    if (values.size() < kept + kBlock) values.resize(2 * kept + kBlock);
    for (size_t i = block * kBlock, end = std::min(s.n, i + kBlock); i < end; ++i) {
      const double value = double(s.row[i]);
      ids[kept] = int32_t(i);
      values[kept] = value;
      kept += value >= bound;
    }
  }
  ids.resize(kept);
  values.resize(kept);
}

// Of ids and values the first `count` in the order (value descending, id ascending); ids stay ascending.
void keep_first(SampleScratch& scratch, size_t count) {
  std::vector<int32_t>& ids = scratch.ids;
  std::vector<double>&values = scratch.weights, &spare = scratch.spare;
  if (count >= ids.size()) return;
  spare.assign(values.begin(), values.end());
  std::nth_element(spare.begin(), spare.begin() + ptrdiff_t(count) - 1, spare.end(), std::greater<>());
  const double edge = spare[count - 1];
  size_t ties = count - size_t(std::count_if(values.begin(), values.end(), [&](double v) { return v > edge; })), kept = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (values[i] < edge || (values[i] == edge && !ties)) continue;
    ties -= values[i] == edge;
    ids[kept] = ids[i];
    values[kept++] = values[i];
  }
  ids.resize(kept);
  values.resize(kept);
}

// The `count` best ids and their scores: none of them is below the best of the block that is `count`th by its best.
template <typename T>
void gather_first(const Scores<T>& s, size_t count) {
  std::vector<double>& spare = s.scratch.spare;
  double bound = kNone;
  if (count <= s.scratch.peaks.size()) {
    spare.assign(s.scratch.peaks.begin(), s.scratch.peaks.end());
    std::nth_element(spare.begin(), spare.begin() + ptrdiff_t(count) - 1, spare.end(), std::greater<>());
    bound = spare[count - 1];
  }
  gather(s, bound);
  keep_first(s.scratch, count);
}

double sum_of(const std::vector<double>& weights) {
  double sum = 0;
  for (double w : weights) sum += w;
  return sum;
}

// How many of the best weights it takes to reach `goal`; 0 when all together do not. The better half of what is left is summed, and
// one of the halves is left: no sort but of the last few. Leaves the weights in another order.
size_t nucleus(std::vector<double>& weights, double goal) {
  constexpr ptrdiff_t kSorted = 64;
  auto low = weights.begin(), high = weights.end();
  double reached = 0;  // by all before `low`, and less than the goal
  while (high - low > kSorted) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, std::greater<>());
    double more = reached;
    for (auto w = low; w < middle; ++w) more += *w;
    if (more >= goal) {
      high = middle;
    } else {
      reached = more;
      low = middle;
    }
  }
  std::sort(low, high, std::greater<>());
  while (low < high) {
    reached += *low++;
    if (reached >= goal) return size_t(low - weights.begin());
  }
  return high == weights.end() ? 0 : size_t(high - weights.begin());  // in another order the same weights had reached it
}

// How deep under the best the nucleus can reach, in exponents: the ids below that weigh half of 1 - top_p together at most.
double deepest(double total, size_t n, double top_p) { return -std::log(total / double(n) * (1 - top_p) / 2); }

void weigh(const SampleLoops& loops, double best, double scale, const std::vector<double>& scores, std::vector<double>& weights) {
  weights.resize(scores.size());
  loops.f64.weights(scores.data(), scores.size(), best, scale, weights.data());
}

// Ids that top-k and top-p leave, and their scores: different scores can have one weight, so the order is theirs.
template <typename T>
void filter(const Scores<T>& s, const SlotParams& p, const SampleLoops& loops) {
  const double scale = scale_of(p);
  SampleScratch& scratch = s.scratch;
  if (p.top_k > 0 && size_t(p.top_k) < s.n) {
    gather_first(s, size_t(p.top_k));
    if (p.top_p >= 1) return;
    weigh(loops, s.best, scale, scratch.weights, scratch.spare);
    const size_t count = nucleus(scratch.spare, sum_of(scratch.spare) * p.top_p);
    if (count) keep_first(scratch, count);
    return;
  }
  scratch.sums.resize(blocks(s.n));
  const double total = s.loops.sums(s.row, s.n, s.best, scale, scratch.sums.data());
  for (double depth : {6.0, std::max(6.0, deepest(total, s.n, p.top_p)), -kNone}) {
    gather(s, s.best - depth / scale);
    weigh(loops, s.best, scale, scratch.weights, scratch.spare);
    if (const size_t count = nucleus(scratch.spare, total * p.top_p)) {
      keep_first(scratch, count);
      return;
    }
  }
}

// The first index whose cumulative weight exceeds `target`; `count`, where rounding lets none.
size_t reach(const double* weights, size_t count, double& cumulative, double target) {
  for (size_t i = 0; i < count; ++i) {
    cumulative += weights[i];
    if (cumulative > target) return i;
  }
  return count;
}

double target_of(double total, double number) { return std::min(total * number, std::nextafter(total, 0.0)); }

// Without top-k and top-p: a block by its sum, then an id in it, so that only one block's weights are ever written.
template <typename T>
int32_t draw_unfiltered(const Scores<T>& s, double scale, double number) {
  std::vector<double>& sums = s.scratch.sums;
  sums.resize(blocks(s.n));
  const double target = target_of(s.loops.sums(s.row, s.n, s.best, scale, sums.data()), number);
  double weights[kBlock], cumulative = 0;
  size_t last = 0;
  for (size_t block = 0; block < sums.size(); ++block) {
    if (sums[block] > 0) last = block;
    if (cumulative + sums[block] > target) break;
    cumulative += sums[block];
  }
  const size_t start = last * kBlock, count = std::min(kBlock, s.n - start);
  s.loops.weights(s.row + start, count, s.best, scale, weights);
  size_t found = reach(weights, count, cumulative, target);
  if (found == count) {  // the block's own sum, in another order, was a little more
    while (found-- > 1 && weights[found] == 0) continue;
  }
  return int32_t(start + found);
}

template <typename T>
int32_t draw(const Scores<T>& s, const Slot& slot, const SampleLoops& loops) {
  const SlotParams& p = slot.params;
  const double number = uniform(p.seed, p.choice, uint32_t(slot.tokens.size()), 0, 0);
  const bool narrowed = (p.top_k > 0 && size_t(p.top_k) < s.n) || p.top_p < 1;
  if (!narrowed && p.min_p <= 0) return draw_unfiltered(s, scale_of(p), number);
  SampleScratch& scratch = s.scratch;
  if (narrowed) {
    filter(s, p, loops);
  } else {  // a weight of min_p has this score, and a margin for its rounding
    gather(s, s.best + (std::log(p.min_p) * (1 + 1e-9) - 1e-9) / scale_of(p) - 1e-9 * std::abs(s.best));
  }
  weigh(loops, s.best, scale_of(p), scratch.weights, scratch.weights);
  for (double& w : scratch.weights) w = w < p.min_p ? 0 : w;
  double cumulative = 0;
  const double target = target_of(sum_of(scratch.weights), number);
  const size_t found = reach(scratch.weights.data(), scratch.weights.size(), cumulative, target);
  return scratch.ids[std::min(found, scratch.ids.size() - 1)];
}

void add_logprobs(const Scores<float>& s, int32_t count, Sample& out) {
  s.scratch.sums.resize(blocks(s.n));
  const double log_sum = std::log(s.loops.sums(s.row, s.n, s.best, 1.0, s.scratch.sums.data()));
  const auto logprob = [&](double score) { return (score - s.best) - log_sum; };  // huge scores would swallow the sum
  out.logprob = logprob(double(s.row[out.token]));
  if (count <= 0) return;
  gather_first(s, std::min(size_t(count), s.n));
  for (size_t i = 0; i < s.scratch.ids.size(); ++i) out.top.emplace_back(s.scratch.ids[i], logprob(s.scratch.weights[i]));
  // the ids ascend: with them the order is that of a stable sort, which would allocate
  std::sort(out.top.begin(), out.top.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
}

template <typename T>
int32_t choose(const Scores<T>& s, const Slot& slot, const SampleLoops& loops) {
  return slot.params.temperature == 0 ? first_best(s) : draw(s, slot, loops);
}

}  // namespace

void sample(const float* logits, int32_t vocab, const Slot& slot, const uint8_t* allowed, SampleScratch& scratch, Sample& out) {
  out.status = kNotFinite;
  out.token = -1;
  out.logprob = 0;
  out.top.clear();
  const SampleLoops& loops = *sample_loops(0);
  const size_t n = size_t(vocab);
  scratch.peaks.resize(blocks(n));
  const Scores<float> plain{logits, n, loops.f32.peaks(logits, n, scratch.peaks.data()), loops.f32, scratch};
  if (std::isnan(plain.best)) return;
  if (!changes_scores(slot, allowed)) {
    out.token = choose(plain, slot, loops);
  } else {
    scratch.scores.resize(n);
    loops.widen(logits, n, scratch.scores.data());
    if (!adjust(slot, allowed, n, scratch)) return;
    const Scores<double> adjusted{scratch.scores.data(), n, loops.f64.peaks(scratch.scores.data(), n, scratch.peaks.data()), loops.f64,
                                  scratch};
    if (adjusted.best == kNone) {
      out.status = kNothingAllowed;
      return;
    }
    out.token = choose(adjusted, slot, loops);
    if (slot.params.logprobs > 0) loops.f32.peaks(logits, n, scratch.peaks.data());
  }
  out.status = kSampled;
  if (slot.params.logprobs >= 0) add_logprobs(plain, slot.params.logprobs, out);
}

double uniform(uint64_t seed, uint32_t choice, uint32_t position, uint32_t draw, uint32_t node) {
  uint32_t c[4] = {position, draw, node, choice};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

}  // namespace cavectl
