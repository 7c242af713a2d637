// Damages plans, packed files and steps for some seconds, for the sanitizers: what is refused says why, what is taken runs.
//
//   fuzz SEED SECONDS
//
// Sizes that a mutant may ask for beyond its own bytes are held small here, so that accepted ones stay cheap. Ends with counts
// and "ok".
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "step_words.h"
#include "tiny_model.h"

namespace {

using namespace cavectl;
using tiny::Bytes;
using tiny::Random;
using tiny::RowWords;
using tiny::Sampling;
using tiny::StepWords;
using tiny::StepWriter;
using tiny::TinyModel;

constexpr int64_t kPages = 8;
constexpr int32_t kRows = 8, kTop = 4;
constexpr uint32_t kMostSlots = 256;  // of a plan that is accepted
const char* const kIsas[] = {"", "scalar"};

[[noreturn]] void die(const char* what, const char* line) {
  std::fprintf(stderr, "fuzz: %s: %s\n", what, line);
  std::exit(1);
}

struct Counts {
  size_t opened = 0, unopened = 0, steps = 0, refused_steps = 0, samples = 0, refused_samples = 0, packed = 0, refused_packed = 0;
};

// --- mutations ---------------------------------------------------------------------------------------------------------------

const int64_t kInteresting[] = {0,       1,         -1,        2,         7,          16,         31,        97,        255,
                                65536,   INT32_MAX, INT32_MIN, UINT32_MAX, INT64_MAX, INT64_MIN, 1ll << 24, 1ll << 31, 1ll << 47,
                                -(1ll << 32)};

int64_t interesting(Random& random) { return kInteresting[random.below(sizeof kInteresting / sizeof *kInteresting)]; }

// One change to a buffer of records: a bit, a byte, an aligned number of 4 or 8 bytes, a swap of two.
void damage(Random& random, uint8_t* at, size_t size) {
  if (size < 16) return;
  const size_t four = random.below(size / 4) * 4, other = random.below(size / 4) * 4, eight = random.below(size / 8) * 8;
  const int64_t value = random.below(2) ? interesting(random) : int64_t(random.next());
  switch (random.below(6)) {
    case 0: at[random.below(size)] ^= uint8_t(1u << random.below(8)); break;
    case 1: at[random.below(size)] = uint8_t(random.next()); break;
    case 2: memcpy(at + four, &value, 4); break;
    case 3: memcpy(at + eight, &value, 8); break;
    case 4: std::swap_ranges(at + four, at + four + 4, at + other); break;
    default: {
      int32_t number;
      memcpy(&number, at + four, 4);
      number = int32_t(uint32_t(number) + uint32_t(random.below(5)) - 2);
      memcpy(at + four, &number, 4);
    }
  }
}

void damage(Random& random, std::vector<int64_t>& words) {
  if (words.empty()) return;
  const size_t at = random.below(words.size());
  switch (random.below(7)) {
    case 0: words[at] = interesting(random); break;
    case 1: words[at] = int64_t(uint64_t(words[at]) + random.below(5) - 2); break;
    case 2: words[at] = int64_t(uint64_t(words[at]) ^ uint64_t(1) << random.below(64)); break;
    case 3: words.erase(words.begin() + int64_t(at)); break;
    case 4: words.insert(words.begin() + int64_t(at), int64_t(random.below(40)) - 2); break;
    case 5: words.resize(at); break;
    default: words[at] = words[random.below(words.size())];
  }
}

void damage(Random& random, std::vector<double>& numbers) {
  constexpr double kOdd[] = {0, -1, 1e308, -1e308, 5e-324, 1e-9, 0.5, 2, __builtin_nan(""), __builtin_inf(), -__builtin_inf()};
  if (numbers.empty()) return;
  if (random.below(8) == 0) return numbers.resize(random.below(numbers.size()));
  numbers[random.below(numbers.size())] = kOdd[random.below(sizeof kOdd / sizeof *kOdd)];
}

// --- steps -------------------------------------------------------------------------------------------------------------------

std::vector<int64_t> some(Random& random, uint32_t vocab, size_t count) {
  std::vector<int64_t> out(count);
  for (int64_t& token : out) token = int64_t(random.below(vocab));
  return out;
}

Sampling sampling(Random& random, uint32_t vocab) {
  Sampling s;
  s.temperature = random.below(3) ? double(random.below(300)) / 100 : 0;
  s.top_k = int64_t(random.below(20));
  s.top_p = random.below(2) ? 1 : 0.8;
  s.min_p = random.below(2) ? 0 : 0.1;
  s.repetition = random.below(2) ? 1 : 1.3;
  s.presence = random.below(2) ? 0 : 0.5;
  s.repeat_last_n = int64_t(random.below(6)) - 1;
  s.min_tokens = int64_t(random.below(3));
  s.logprobs = int64_t(random.below(kTop + 3)) - 1;
  s.seed = int64_t(random.next());
  s.bias_ids = some(random, vocab, random.below(4));
  s.bias.assign(s.bias_ids.size(), -3.5);
  s.stop_ids = some(random, vocab, random.below(3));
  s.prompt = some(random, vocab, random.below(12));
  s.output = some(random, vocab, random.below(4));
  return s;
}

// A step that keeps every rule of a model with so many groups: rows with pages of their own.
StepWords good_step(Random& random, const tiny::Shape& shape) {
  StepWriter step;
  const size_t rows = 1 + random.below(3), groups = shape.windows.size();
  for (size_t r = 0; r < rows; ++r) {
    RowWords row;
    const bool sampled = random.below(4) != 0;
    if (sampled) step.open(int64_t(r), sampling(random, shape.vocab));
    row.position = int64_t(random.below(20));
    row.tokens = some(random, shape.vocab, random.below(3) ? 1 : 1 + random.below(12));
    row.slot = sampled ? int64_t(r) : -1;
    row.mask = sampled && random.below(3) == 0 ? 0 : -1;
    if (sampled && row.mask < 0 && row.tokens.size() > 1 && random.below(2)) {
      for (size_t i = 0, end = 1 + random.below(row.tokens.size() - 1); i < end; ++i) row.parents.push_back(int64_t(random.below(i + 1)) - 1);
    }
    row.pages.assign(groups, {int64_t(2 * r), int64_t(2 * r + 1)});
    step.rows.push_back(row);
  }
  if (random.below(3) == 0) step.closed.push_back(int64_t(random.below(shape.max_slots)));
  if (random.below(3) == 0) step.copies.push_back({0, 0, kPages - 1});
  StepWords out = step.write();
  for (size_t i = 0; i < (shape.vocab + 7) / 8; ++i) out.masks.push_back(uint8_t(random.next() | 1));
  return out;
}

void check(int32_t code, const char* error) {
  if (code && !error[0]) die("a refusal", "without a line");
  if (code == CAVECTL_INTERNAL) die("an internal failure", error);
}

void run_steps(Random& random, cavectl_engine* engine, const tiny::Shape& shape, bool good_must_run, Counts& counts) {
  tiny::Results results(kRows, kTop);
  for (size_t i = 0, end = 1 + random.below(12); i < end; ++i) {
    StepWords step = good_step(random, shape);
    const bool good = i == 0 || random.below(4) == 0;
    for (size_t n = good ? 0 : 1 + random.below(3); n; --n) {
      random.below(5) ? damage(random, step.words) : damage(random, step.numbers);
    }
    if (!good && random.below(8) == 0) step.masks.resize(random.below(step.masks.size()));
    cavectl_keep_logits(engine, int32_t(random.below(2)));
    const int32_t code = results.run(engine, step);
    check(code, results.error);
    if (code && good && good_must_run) die("a good step", results.error);
    ++(code ? counts.refused_steps : counts.steps);
    const int64_t rows = cavectl_logits(engine, nullptr, 0);
    if (rows > 4096 || rows < 0) die("logits", "more than the step has tokens");
  }
}

void grow(Random& random, cavectl_engine* engine, size_t groups) {
  char error[CAVECTL_ERROR_BYTES] = {};
  std::vector<int64_t> pages(groups, kPages + int64_t(random.below(4))), held(random.below(4)), counts(groups, 0);
  for (int64_t& page : held) page = random.below(4) ? int64_t(random.below(kPages)) : interesting(random);
  counts[random.below(groups)] = int64_t(held.size());
  if (random.below(6) == 0) pages[random.below(groups)] = random.below(2) ? -1 : 3;
  check(cavectl_grow(engine, pages.data(), held.data(), counts.data(), int32_t(groups - (random.below(9) == 0)), error), error);
}

// --- plans and packed files -----------------------------------------------------------------------------------------------------

// What a mutant may ask for that its own bytes do not pay for.
void hold_small(Bytes& plan) {
  PlanHeader* header = reinterpret_cast<PlanHeader*>(plan.data());
  if (plan.size() < sizeof *header) return;
  if (header->max_slots > kMostSlots && header->max_slots <= 1u << 20) header->max_slots = kMostSlots;
}

// Header and records of both, and the weights, which may be anything.
void damage_model(Random& random, TinyModel& model) {
  const FileHeader* header = reinterpret_cast<const FileHeader*>(model.packed.data());
  const size_t records = size_t(header->meta_offset), whole = model.packed.size();
  for (size_t n = 1 + random.below(3); n; --n) {
    switch (random.below(8)) {
      case 0: damage(random, model.packed.data(), records); break;
      case 1: damage(random, model.packed.data() + records, whole - records); break;
      case 2: damage(random, model.plan.data() + random.below(9) * 8, sizeof(PlanHeader) - 64); break;
      default: damage(random, model.plan.data(), model.plan.size());
    }
  }
  if (random.below(20) == 0) model.packed = model.packed.first(random.below(whole));
  if (random.below(20) == 0) model.plan = model.plan.first(random.below(model.plan.size()));
  hold_small(model.plan);
}

void open_and_run(Random& random, const TinyModel& model, bool damaged, Counts& counts) {
  char error[CAVECTL_ERROR_BYTES] = {};
  int64_t pages[64];
  std::fill(pages, pages + 64, kPages);
  const int32_t groups = int32_t(model.shape.windows.size());
  const int threads = random.below(4) ? 1 : 3;
  const Bytes &packed = model.packed, &plan = model.plan;
  cavectl_engine* engine = cavectl_open(packed.data(), packed.size(), plan.data(), plan.size(), pages, groups, threads,
                                        kIsas[random.below(2)], error);
  if (!engine) {
    check(CAVECTL_INVALID, error);
    if (!damaged) die("a good model", error);
    ++counts.unopened;
    return;
  }
  ++counts.opened;
  run_steps(random, engine, model.shape, !damaged, counts);
  if (random.below(3) == 0) {
    grow(random, engine, size_t(groups));
    run_steps(random, engine, model.shape, !damaged, counts);
  }
  cavectl_close(engine);
}

// --- a slot alone ---------------------------------------------------------------------------------------------------------------

void sample(Random& random, Counts& counts) {
  StepWriter writer;
  const uint32_t vocab = uint32_t(1 + random.below(200));
  writer.open(0, sampling(random, vocab));
  StepWords slot = writer.write();
  slot.words.erase(slot.words.begin(), slot.words.begin() + 2);  // no slots closed, one opened
  slot.words.resize(slot.words.size() - 2);                       // no copies, no rows
  for (size_t n = random.below(3); n; --n) random.below(2) ? damage(random, slot.words) : damage(random, slot.numbers);
  std::vector<float> logits(vocab);
  for (float& logit : logits) logit = random.number() * (random.below(20) ? 5.0f : 1e38f);
  if (random.below(10) == 0) logits[random.below(vocab)] = __builtin_nanf("");
  std::vector<uint8_t> mask((vocab + 7) / 8);
  for (uint8_t& byte : mask) byte = uint8_t(random.below(2) ? random.next() : 0);
  char error[CAVECTL_ERROR_BYTES] = {};
  int32_t status = 0, token = 0, count = 0, ids[kTop];
  double logprob = 0, logprobs[kTop];
  const int64_t words = int64_t(slot.words.size()), numbers = int64_t(slot.numbers.size());
  const uint8_t* allowed = random.below(2) ? mask.data() : nullptr;
  const int32_t code = cavectl_sample(logits.data(), int32_t(vocab), slot.words.data(), words, slot.numbers.data(), numbers, allowed,
                                      &status, &token, &logprob, kTop, &count, ids, logprobs, error);
  check(code, error);
  if (!code && status == 1 && (token < 0 || uint32_t(token) >= vocab)) die("a sample", "outside of the vocabulary");
  ++(code ? counts.refused_samples : counts.samples);
}

// --- packing ---------------------------------------------------------------------------------------------------------------------

struct SourceType {
  const char* name;
  uint64_t elements, bytes;  // of a block
  uint32_t kind;
};

constexpr SourceType kTypes[] = {
    {"F32", 1, 4, kF32},        {"F64", 1, 8, kF32},        {"F16", 1, 2, kF16},         {"BF16", 1, 2, kBF16},
    {"Q4_0", 32, 18, kQ4_S},    {"Q4_1", 32, 20, kQ4_M},    {"Q5_0", 32, 22, kQ8_S},     {"Q5_1", 32, 24, kQ8_M},
    {"Q8_0", 32, 34, kQ8_S},    {"Q2_K", 256, 84, kQ4_M16}, {"Q3_K", 256, 110, kQ4_M16}, {"Q4_K", 256, 144, kQ4_M},
    {"Q5_K", 256, 176, kQ8_M}, {"Q6_K", 256, 210, kQ8_S16},
};

// Any bytes as a tensor of some shape; sizes that do not fit each other now and then.
void pack(Random& random, Counts& counts) {
  const SourceType& type = kTypes[random.below(sizeof kTypes / sizeof *kTypes)];
  uint64_t rows = 1 + random.below(40), columns = type.elements * (1 + random.below(type.elements == 1 ? 70 : 3));
  uint32_t kind = type.kind;
  if (random.below(6) == 0) kind = uint32_t(random.below(kKinds + 1));
  if (kind == kVectorF32) rows = 1;
  Bytes source(rows * columns / type.elements * type.bytes);
  for (size_t i = 0; i < source.size(); ++i) source.data()[i] = uint8_t(random.next());
  Bytes target(kind < kKinds ? tensor_bytes(kind, rows, columns) : 64);
  uint64_t heads = random.below(4) ? 0 : random.below(6), said = source.size();
  uint64_t* const wrong[] = {&rows, &columns, &heads, &said};
  if (random.below(6) == 0) *wrong[random.below(4)] = random.below(2) ? uint64_t(interesting(random)) : 1 + random.below(300);
  if (said > source.size()) said = source.size();
  char error[CAVECTL_ERROR_BYTES] = {};
  int32_t exponent = 0;
  const int32_t code = cavectl_pack(type.name, source.data(), said, rows, columns, heads, kind, target.data(), target.size(), &exponent,
                                    error);
  check(code, error);
  ++(code ? counts.refused_packed : counts.packed);
  if (code) return;
  const uint64_t first = random.below(rows + 1), count = random.below(rows + 2);
  std::vector<float> back(std::min(count, rows) * columns);
  check(cavectl_unpack(kind, exponent, target.data(), target.size(), rows, columns, first, count, back.data(), error), error);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) die("usage", "fuzz SEED SECONDS");
  Random random(uint64_t(std::atoll(arguments[1])));
  std::vector<TinyModel> models;
  for (const tiny::Shape& shape : tiny::shapes()) models.push_back(tiny::make(shape, models.size() + 1));
  Counts counts;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(arguments[2]));
  while (std::chrono::steady_clock::now() < end) {
    TinyModel model = models[random.below(models.size())];
    const bool damaged = random.below(4) != 0;
    if (damaged) damage_model(random, model);
    open_and_run(random, model, damaged, counts);
    for (int i = 0; i < 20; ++i) sample(random, counts);
    for (int i = 0; i < 5; ++i) pack(random, counts);
  }
  std::printf("opened %zu unopened %zu steps %zu refused_steps %zu samples %zu refused_samples %zu packed %zu refused_packed %zu\nok\n",
              counts.opened, counts.unopened, counts.steps, counts.refused_steps, counts.samples, counts.refused_samples, counts.packed,
              counts.refused_packed);
  return 0;
}
