#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

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

// Bias, penalties and minimum length, in the order of SamplingParams; then the grammar.
void adjust(const Slot& slot, const uint8_t* allowed, int32_t vocab, double* scores) {
  const SlotParams& p = slot.params;
  for (const auto& [id, bias] : p.bias) scores[id] += bias;
  if (p.repetition_penalty != 1 && p.repeat_last_n != 0) {
    const size_t count = slot.tokens.size();
    const size_t first = p.repeat_last_n < 0 || size_t(p.repeat_last_n) > count ? 0 : count - size_t(p.repeat_last_n);
    const std::unordered_set<int32_t> seen(slot.tokens.begin() + ptrdiff_t(first), slot.tokens.end());
    for (int32_t id : seen) scores[id] = scores[id] > 0 ? scores[id] / p.repetition_penalty : scores[id] * p.repetition_penalty;
  }
  if (p.presence_penalty != 0 || p.frequency_penalty != 0) {
    for (const auto& [id, count] : slot.counts) scores[id] -= p.presence_penalty + p.frequency_penalty * count;
  }
  if (int64_t(slot.tokens.size() - slot.prompt_tokens) < p.min_tokens) {
    for (int32_t id : p.stop_ids) {
      if (id >= 0 && id < vocab) scores[id] = kNone;
    }
  }
  if (!allowed) return;
  for (int32_t i = 0; i < vocab; ++i) {
    if (!(allowed[i / 8] >> (i % 8) & 1)) scores[i] = kNone;
  }
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
  s.scratch.ids.clear();
  s.scratch.weights.clear();
  for (size_t block = 0; block < s.scratch.peaks.size(); ++block) {
    if (!(s.scratch.peaks[block] >= bound)) continue;
    const size_t end = std::min(s.n, (block + 1) * kBlock);
    for (size_t i = block * kBlock; i < end; ++i) {
      if (double(s.row[i]) < bound) continue;
      s.scratch.ids.push_back(int32_t(i));
      s.scratch.weights.push_back(double(s.row[i]));
    }
  }
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

// How many of the best weights it takes to reach `goal`; 0 when all together do not.
size_t nucleus(const std::vector<double>& weights, double goal, std::vector<double>& spare) {
  spare.assign(weights.begin(), weights.end());
  double reached = 0;
  size_t sorted = 0;
  while (sorted < spare.size()) {
    const size_t more = std::min(spare.size(), std::max<size_t>(256, 8 * sorted));
    const auto from = spare.begin() + ptrdiff_t(sorted), to = spare.begin() + ptrdiff_t(more);
    std::nth_element(from, to - 1, spare.end(), std::greater<>());
    std::sort(from, to, std::greater<>());
    for (; sorted < more; ++sorted) {
      reached += spare[sorted];
      if (reached >= goal) return sorted + 1;
    }
  }
  return 0;
}

double sum_of(const std::vector<double>& weights) {
  double sum = 0;
  for (double w : weights) sum += w;
  return sum;
}

void weigh(const SampleLoops& loops, double best, double scale, std::vector<double>& scores) {
  loops.f64.weights(scores.data(), scores.size(), best, scale, scores.data());
}

// Ids and weights that top-k and top-p leave.
template <typename T>
void filter(const Scores<T>& s, const SlotParams& p, const SampleLoops& loops) {
  const double scale = 1 / p.temperature;
  SampleScratch& scratch = s.scratch;
  if (p.top_k > 0 && size_t(p.top_k) < s.n) {
    gather_first(s, size_t(p.top_k));
    weigh(loops, s.best, scale, scratch.weights);
    if (p.top_p >= 1) return;
    const size_t count = nucleus(scratch.weights, sum_of(scratch.weights) * p.top_p, scratch.spare);
    if (count) keep_first(scratch, count);
    return;
  }
  scratch.sums.resize(blocks(s.n));
  const double goal = s.loops.sums(s.row, s.n, s.best, scale, scratch.sums.data()) * p.top_p;
  for (double depth = 8; depth < 1024; depth *= 4) {  // the weights above exp(-depth), and then more of them
    gather(s, s.best - depth * p.temperature);
    weigh(loops, s.best, scale, scratch.weights);
    if (const size_t count = nucleus(scratch.weights, goal, scratch.spare)) {
      keep_first(scratch, count);
      return;
    }
  }
  gather(s, kNone);
  weigh(loops, s.best, scale, scratch.weights);
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
int32_t draw_unfiltered(const Scores<T>& s, double temperature, double number) {
  std::vector<double>& sums = s.scratch.sums;
  sums.resize(blocks(s.n));
  const double target = target_of(s.loops.sums(s.row, s.n, s.best, 1 / temperature, sums.data()), number);
  double weights[kBlock], cumulative = 0;
  size_t last = 0;
  for (size_t block = 0; block < sums.size(); ++block) {
    if (sums[block] > 0) last = block;
    if (cumulative + sums[block] > target) break;
    cumulative += sums[block];
  }
  const size_t start = last * kBlock, count = std::min(kBlock, s.n - start);
  s.loops.weights(s.row + start, count, s.best, 1 / temperature, weights);
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
  if (!narrowed && p.min_p <= 0) return draw_unfiltered(s, p.temperature, number);
  SampleScratch& scratch = s.scratch;
  if (narrowed) {
    filter(s, p, loops);
  } else {  // a weight of min_p has this score, and a margin for its rounding
    gather(s, s.best + (std::log(p.min_p) * p.temperature) * (1 + 1e-9) - 1e-9 * std::abs(s.best) - 1e-300);
    weigh(loops, s.best, 1 / p.temperature, scratch.weights);
  }
  for (double& w : scratch.weights) w = w < p.min_p ? 0 : w;
  double cumulative = 0;
  const double target = target_of(sum_of(scratch.weights), number);
  const size_t found = reach(scratch.weights.data(), scratch.weights.size(), cumulative, target);
  return scratch.ids[std::min(found, scratch.ids.size() - 1)];
}

void add_logprobs(const Scores<float>& s, int32_t count, Sample& out) {
  s.scratch.sums.resize(blocks(s.n));
  const double norm = s.best + std::log(s.loops.sums(s.row, s.n, s.best, 1.0, s.scratch.sums.data()));
  out.logprob = double(s.row[out.token]) - norm;
  if (count <= 0) return;
  gather_first(s, std::min(size_t(count), s.n));
  for (size_t i = 0; i < s.scratch.ids.size(); ++i) out.top.emplace_back(s.scratch.ids[i], s.scratch.weights[i] - norm);
  std::stable_sort(out.top.begin(), out.top.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
}

template <typename T>
int32_t choose(const Scores<T>& s, const Slot& slot, const SampleLoops& loops) {
  return slot.params.temperature == 0 ? first_best(s) : draw(s, slot, loops);
}

}  // namespace

void sample(const float* logits, int32_t vocab, const Slot& slot, const uint8_t* allowed, SampleScratch& scratch, Sample& out) {
  out = Sample{};
  const SampleLoops& loops = *sample_loops(0);
  const size_t n = size_t(vocab);
  scratch.peaks.resize(blocks(n));
  const Scores<float> plain{logits, n, loops.f32.peaks(logits, n, scratch.peaks.data()), loops.f32, scratch};
  if (std::isnan(plain.best)) {
    out.status = kNotFinite;
    return;
  }
  out.status = kSampled;
  if (!changes_scores(slot, allowed)) {
    out.token = choose(plain, slot, loops);
  } else {
    scratch.scores.resize(n);
    loops.widen(logits, n, scratch.scores.data());
    adjust(slot, allowed, vocab, scratch.scores.data());
    const Scores<double> adjusted{scratch.scores.data(), n, loops.f64.peaks(scratch.scores.data(), n, scratch.peaks.data()), loops.f64,
                                  scratch};
    if (adjusted.best == kNone) {
      out.status = kNothingAllowed;
      return;
    }
    out.token = choose(adjusted, slot, loops);
    if (slot.params.logprobs > 0) loops.f32.peaks(logits, n, scratch.peaks.data());
  }
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
