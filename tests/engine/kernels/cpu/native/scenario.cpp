// A life of small models through the C ABI, for the sanitizers: prefill in chunks, decode in batches, copies, growth, windows, a
// context long enough to be cut over threads, every sampling parameter, refusals.
//
//   scenario LENGTH ISA:THREADS ...
//
// LENGTH is the long context's, in tokens. Each model lives once for every ISA:THREADS, and all must agree to the bit. Ends with
// "ok".
#include <cstdio>
#include <string>

#include "step_words.h"
#include "tiny_model.h"

namespace {

using tiny::RowWords;
using tiny::Sampling;
using tiny::StepWords;
using tiny::StepWriter;

constexpr int64_t kPages = 80, kMorePages = 100;
constexpr int32_t kRows = 6, kTop = 5;

[[noreturn]] void die(const char* what, const char* line) {
  std::fprintf(stderr, "scenario: %s: %s\n", what, line);
  std::exit(1);
}

// Everything that a life has shown so far.
class Digest {
 public:
  void add(const void* data, size_t bytes) {
    const uint8_t* at = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ at[i]) * 1099511628211u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 1469598103934665603u;
};

struct Sequence {
  int64_t length = 0;
  std::vector<std::vector<int64_t>> pages;  // of each group
};

class Life {
 public:
  Life(const tiny::TinyModel& model, const std::string& isa, int threads)
      : model_(model), held_(model.shape.windows.size()), next_(held_.size(), 0), results_(kRows, kTop) {
    const std::vector<int64_t> pages(held_.size(), kPages);
    engine_ = cavectl_open(model.packed.data(), model.packed.size(), model.plan.data(), model.plan.size(), pages.data(),
                           int32_t(pages.size()), threads, isa.c_str(), results_.error);
    if (!engine_) die("open", results_.error);
  }
  ~Life() { cavectl_close(engine_); }

  uint64_t live(int64_t length) {
    Sequence a = begin(), b = begin(), c = begin(), deep = begin();
    prefill(a, b, c);
    cavectl_keep_logits(engine_, 1);
    for (int i = 0; i < 3; ++i) decode({&a, &b, &c});
    cavectl_keep_logits(engine_, 0);
    refuse();
    Sequence fork = copy_of(a);
    decode({&a, &b, &c, &fork});
    grow();
    go_deep(deep, length);
    for (int i = 0; i < 3; ++i) decode({&a, &b, &deep});
    for (int i = 0; i < 3; ++i) decode({&deep});
    close();
    return digest_.value();
  }

 private:
  Sequence begin() const { return {0, std::vector<std::vector<int64_t>>(held_.size())}; }

  // Adds so many tokens to a sequence: takes pages for them, gives up those that a window has passed.
  RowWords row(Sequence& of, const std::vector<int64_t>& tokens, int64_t slot) {
    RowWords out;
    out.position = of.length;
    out.tokens = tokens;
    out.slot = slot;
    of.length += int64_t(tokens.size());
    for (size_t group = 0; group < held_.size(); ++group) {
      auto& pages = of.pages[group];
      while (int64_t(pages.size()) * 16 < of.length) {
        held_[group].push_back(next_[group]);
        pages.push_back(next_[group]++);
      }
      const int64_t window = model_.shape.windows[group];
      for (int64_t i = 0; window && (i + 1) * 16 <= out.position + 1 - window; ++i) pages[size_t(i)] = -1;
    }
    out.pages = of.pages;
    return out;
  }

  std::vector<int64_t> some(int64_t count) {
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(int64_t(random_.below(model_.shape.vocab)));
    return tokens;
  }

  void run(const StepWords& step) {
    if (results_.run(engine_, step)) die("step", results_.error);
    for (int32_t status : results_.status) {
      if (status > 1) die("step", "a row was not sampled");
    }
    digest_.add(results_.drawn.data(), results_.drawn.size() * 4);
    digest_.add(results_.status.data(), results_.status.size() * 4);
    digest_.add(results_.token.data(), results_.token.size() * 4);
    digest_.add(results_.logprob.data(), results_.logprob.size() * 8);
    for (size_t r = 0; r < size_t(results_.max_draws); ++r) {
      digest_.add(results_.top_ids.data() + r * kTop, size_t(results_.top_count[r]) * 4);
      digest_.add(results_.top_logprobs.data() + r * kTop, size_t(results_.top_count[r]) * 8);
    }
    const int64_t rows = cavectl_logits(engine_, nullptr, 0);
    std::vector<float> logits(size_t(rows) * model_.shape.vocab);
    if (cavectl_logits(engine_, logits.data(), rows) != rows) die("logits", "another count");
    digest_.add(logits.data(), logits.size() * sizeof(float));
  }

  void prefill(Sequence& a, Sequence& b, Sequence& c) {
    StepWriter step;
    Sampling greedy, warm, all;
    warm.temperature = 0.9;
    warm.seed = -3;
    warm.prompt = some(40);
    all.temperature = 1.3;
    all.top_k = 40;
    all.top_p = 0.9;
    all.min_p = 0.01;
    all.repetition = 1.2;
    all.presence = 0.1;
    all.frequency = -0.2;
    all.min_tokens = 3;
    all.repeat_last_n = -1;
    all.logprobs = kTop;
    all.bias_ids = {1, 2, 5};
    all.bias = {2.5, -100, 1};
    all.stop_ids = {3, 1 << 20};
    all.prompt = some(10);
    all.output = some(2);
    step.open(0, greedy);
    step.open(1, warm);
    step.open(2, all);
    step.open(3, all);
    step.rows = {row(a, some(33), 0), row(b, some(100), -1), row(c, some(1), 2)};
    run(step.write());
    StepWriter more;
    more.rows = {row(b, some(17), 1)};
    more.rows[0].mask = 3;
    StepWords words = more.write();
    words.masks.assign(3 + (model_.shape.vocab + 7) / 8, 0x5b);
    run(words);
  }

  // One more token of each: the one that its slot has sampled last. Slots are those of `prefill` in turn.
  void decode(const std::vector<Sequence*>& sequences) {
    StepWriter step;
    for (size_t i = 0; i < sequences.size(); ++i) step.rows.push_back(row(*sequences[i], {i == 3 ? 7 : -1}, int64_t(i)));
    run(step.write());
  }

  // The last page of each group is copied, those before it are shared.
  Sequence copy_of(const Sequence& of) {
    Sequence copy = of;
    StepWriter step;
    for (size_t group = 0; group < held_.size(); ++group) {
      step.copies.push_back({int64_t(group), of.pages[group].back(), next_[group]});
      held_[group].push_back(next_[group]);
      copy.pages[group].back() = next_[group]++;
    }
    run(step.write());
    return copy;
  }

  void grow() {
    std::vector<int64_t> pages(held_.size(), kMorePages), held, counts;
    for (const auto& group : held_) {
      counts.push_back(int64_t(group.size()));
      held.insert(held.end(), group.begin(), group.end());
    }
    const auto to = [&] {
      return cavectl_grow(engine_, pages.data(), held.data(), counts.data(), int32_t(pages.size()), results_.error);
    };
    if (to()) die("grow", results_.error);
    pages[0] = 1;
    if (to() != CAVECTL_INVALID) die("grow", "became smaller");
  }

  void go_deep(Sequence& deep, int64_t length) {
    while (deep.length < length) {
      StepWriter step;
      step.rows = {row(deep, some(std::min<int64_t>(length - deep.length, 150)), deep.length + 150 >= length ? 2 : -1)};
      run(step.write());
    }
  }

  // Words that break a rule change nothing: the digest of what comes after them is the same as without them.
  void refuse() {
    RowWords good;
    good.tokens = {1};
    good.pages.assign(held_.size(), {int64_t(kPages - 1)});
    RowWords late = good, outside = good, unknown = good, unopened = good, negative = good;
    late.position = 16;
    outside.pages[0] = {kPages};
    unknown.tokens = {model_.shape.vocab};
    unopened.slot = 5;
    negative.position = -1;
    for (const RowWords& bad : {late, outside, unknown, unopened, negative}) {
      StepWriter step;
      step.closed = {0};
      step.rows = {bad};
      if (results_.run(engine_, step.write()) != CAVECTL_INVALID || !results_.error[0]) die("refusal", "a bad step was taken");
    }
    StepWords cut = StepWriter().write();
    cut.words.pop_back();
    if (results_.run(engine_, cut) != CAVECTL_INVALID) die("refusal", "a short step was taken");
  }

  void close() {
    StepWriter step;
    step.closed = {0, 1, 2, 3};
    run(step.write());
    if (cavectl_resident_bytes(engine_) < 1) die("resident bytes", "none");
  }

  const tiny::TinyModel& model_;
  std::vector<std::vector<int64_t>> held_;
  std::vector<int64_t> next_;
  tiny::Results results_;
  tiny::Random random_{5};
  Digest digest_;
  cavectl_engine* engine_ = nullptr;
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) die("usage", "scenario LENGTH ISA:THREADS ...");
  size_t number = 0;
  for (const tiny::Shape& shape : tiny::shapes()) {
    const tiny::TinyModel model = tiny::make(shape, ++number);
    uint64_t first = 0;
    for (int i = 2; i < count; ++i) {
      const std::string argument = arguments[i];
      const size_t colon = argument.find(':');
      Life life(model, argument.substr(0, colon), std::atoi(argument.c_str() + colon + 1));
      const uint64_t digest = life.live(std::atoi(arguments[1]));
      std::printf("model %zu %s %016llx\n", number, arguments[i], static_cast<unsigned long long>(digest));
      if (i > 2 && digest != first) die("another result", arguments[i]);
      first = digest;
    }
  }
  std::puts("ok");
  return 0;
}
