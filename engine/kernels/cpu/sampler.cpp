#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

namespace cavectl {

namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

bool all_finite(const float* logits, int32_t n) {
  float sum = 0;  // x - x is 0, or NaN for NaN and infinities
  for (int32_t i = 0; i < n; ++i) sum += logits[i] - logits[i];
  return sum == 0;
}

template <typename T>
int32_t first_best(const T* scores, int32_t n) {
  int32_t best = 0;
  for (int32_t i = 1; i < n; ++i) best = scores[i] > scores[best] ? i : best;
  return best;
}

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

// Keeps of ids and values the first `count` in the order (value descending, id ascending); ids stay ascending.
void keep_first(std::vector<int32_t>& ids, std::vector<double>& values, size_t count, std::vector<double>& spare) {
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

// How many of the best weights it takes to reach `top_p` of their sum.
size_t nucleus(const std::vector<double>& weights, double top_p, std::vector<double>& spare) {
  double sum = 0;
  for (double w : weights) sum += w;
  const double goal = sum * top_p;
  spare.assign(weights.begin(), weights.end());
  double reached = 0;
  size_t sorted = 0;
  while (sorted < spare.size()) {
    const size_t more = std::min(spare.size(), std::max<size_t>(256, 8 * sorted));
    std::nth_element(spare.begin() + ptrdiff_t(sorted), spare.begin() + ptrdiff_t(more) - 1, spare.end(), std::greater<>());
    std::sort(spare.begin() + ptrdiff_t(sorted), spare.begin() + ptrdiff_t(more), std::greater<>());
    for (; sorted < more; ++sorted) {
      reached += spare[sorted];
      if (reached >= goal) return sorted + 1;
    }
  }
  return spare.size();
}

int32_t draw(const Slot& slot, int32_t vocab, SampleScratch& scratch) {
  const SlotParams& p = slot.params;
  std::vector<double>&scores = scratch.scores, &weights = scratch.weights;
  std::vector<double> spare;
  std::vector<int32_t>& ids = scratch.ids;
  ids.resize(size_t(vocab));
  for (int32_t i = 0; i < vocab; ++i) ids[size_t(i)] = i;
  if (p.top_k > 0) keep_first(ids, scores, size_t(p.top_k), spare);
  const double best = *std::max_element(scores.begin(), scores.end());
  weights.resize(scores.size());
  for (size_t i = 0; i < scores.size(); ++i) weights[i] = std::exp((scores[i] - best) / p.temperature);
  if (p.top_p < 1) keep_first(ids, weights, nucleus(weights, p.top_p, spare), spare);
  double total = 0;
  for (double& w : weights) {
    if (w < p.min_p) w = 0;
    total += w;
  }
  double target = total * uniform(p.seed, p.choice, uint32_t(slot.tokens.size()), 0, 0);
  target = std::min(target, std::nextafter(total, 0.0));
  double cumulative = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    cumulative += weights[i];
    if (cumulative > target) return ids[i];
  }
  return ids.back();
}

void add_logprobs(const float* logits, int32_t vocab, int32_t count, Sample& out, SampleScratch& scratch) {
  const double best = logits[first_best(logits, vocab)];
  double sum = 0;
  for (int32_t i = 0; i < vocab; ++i) sum += std::exp(double(logits[i]) - best);
  const double norm = best + std::log(sum);
  out.logprob = double(logits[out.token]) - norm;
  if (count <= 0) return;
  std::vector<int32_t>& ids = scratch.ids;
  ids.resize(size_t(vocab));
  for (int32_t i = 0; i < vocab; ++i) ids[size_t(i)] = i;
  const auto before = [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  const size_t kept = std::min(size_t(count), ids.size());
  std::partial_sort(ids.begin(), ids.begin() + ptrdiff_t(kept), ids.end(), before);
  for (size_t i = 0; i < kept; ++i) out.top.emplace_back(ids[i], double(logits[ids[i]]) - norm);
}

}  // namespace

void sample(const float* logits, int32_t vocab, const Slot& slot, const uint8_t* allowed, SampleScratch& scratch, Sample& out) {
  out = Sample{};
  if (!all_finite(logits, vocab)) {
    out.status = kNotFinite;
    return;
  }
  out.status = kSampled;
  const bool greedy = slot.params.temperature == 0;
  if (greedy && !changes_scores(slot, allowed)) {
    out.token = first_best(logits, vocab);
  } else {
    scratch.scores.assign(logits, logits + vocab);
    adjust(slot, allowed, vocab, scratch.scores.data());
    out.token = first_best(scratch.scores.data(), vocab);
    if (scratch.scores[size_t(out.token)] == kNone) {
      out.status = kNothingAllowed;
      out.token = -1;
      return;
    }
    if (!greedy) out.token = draw(slot, vocab, scratch);
  }
  if (slot.params.logprobs >= 0) add_logprobs(logits, vocab, slot.params.logprobs, out, scratch);
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
