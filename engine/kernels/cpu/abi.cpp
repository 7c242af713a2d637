// The C ABI of an engine: checks and unpacks what ctypes hands over, and turns every failure into a code and a line.
#include "cavectl.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>

#include "abi_error.h"
#include "engine.h"
#include "packed_check.h"

struct cavectl_engine {
  cavectl::Engine engine;
  cavectl::Step step;  // kept between steps for its memory
  std::vector<cavectl::Sample> samples;
};

namespace {

using cavectl::fail;

// Runs f, which returns a code; what it throws becomes one.
template <typename F>
int32_t guarded(char* error, const F& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(error, CAVECTL_MEMORY, "the system gave no memory");
  } catch (const std::system_error&) {
    return fail(error, CAVECTL_MEMORY, "the system gave no threads");
  } catch (const std::exception& thrown) {
    return fail(error, CAVECTL_INTERNAL, thrown.what());
  }
}

bool page_counts(const int64_t* pages, int32_t groups, std::vector<size_t>& out) {
  for (int32_t i = 0; i < groups; ++i) {
    if (pages[i] < 0 || pages[i] > INT32_MAX) return false;
    out.push_back(size_t(pages[i]));
  }
  return true;
}

}  // namespace

extern "C" {

int32_t cavectl_abi(void) { return CAVECTL_ABI; }

const char* cavectl_isas(void) {
  static const std::string all = [] {
    const char* names[8];
    const int count = cavectl::list_kernels(names, 8);
    std::string joined;
    for (int i = 0; i < count; ++i) joined += (i ? "," : "") + std::string(names[i]);
    return joined;
  }();
  return all.c_str();
}

cavectl_engine* cavectl_open(const void* packed, uint64_t packed_bytes, const void* plan, uint64_t plan_bytes,
                                            const int64_t* pages, int32_t groups, int32_t threads, const char* isa, char* error) {
  cavectl_engine* opened = nullptr;
  guarded(error, [&] {
    if (const char* wrong = cavectl::validate_packed(packed, packed_bytes)) return fail(error, CAVECTL_INVALID, wrong);
    cavectl::Model model;
    const std::string wrong = cavectl::read_plan(plan, plan_bytes, packed, packed_bytes, model);
    if (!wrong.empty()) return fail(error, CAVECTL_INVALID, wrong.c_str());
    std::vector<size_t> counts;
    if (groups < 0 || size_t(groups) != model.windows.size() || !page_counts(pages, groups, counts)) {
      return fail(error, CAVECTL_INVALID, "the page counts are not those of the plan's groups");
    }
    if (threads < 1 || threads > 1024) return fail(error, CAVECTL_INVALID, "the number of threads is outside 1..1024");
    const cavectl::Kernels* kernels = cavectl::choose_kernels(isa ? isa : "");
    if (!kernels) return fail(error, CAVECTL_INVALID, "this machine does not have that instruction set");
    opened = new cavectl_engine{cavectl::Engine(std::move(model), *kernels, threads, counts), {}, {}};
    return 0;
  });
  return opened;
}

void cavectl_close(cavectl_engine* engine) { delete engine; }

int32_t cavectl_grow(cavectl_engine* engine, const int64_t* pages, const int64_t* held, const int64_t* held_counts,
                                    int32_t groups, char* error) {
  return guarded(error, [&]() -> int32_t {
    std::vector<size_t> counts;
    if (groups < 0 || size_t(groups) != engine->engine.groups() || !page_counts(pages, groups, counts)) {
      return fail(error, CAVECTL_INVALID, "the page counts are not those of the model's groups");
    }
    std::vector<std::vector<size_t>> kept(counts.size());
    for (size_t group = 0; group < counts.size(); ++group) {
      const size_t now = engine->engine.pages(group);
      if (counts[group] < now) return fail(error, CAVECTL_INVALID, "a cache cannot become smaller");
      for (int64_t i = 0; i < held_counts[group]; ++i, ++held) {
        if (*held < 0 || size_t(*held) >= now) return fail(error, CAVECTL_INVALID, "a page to be kept is outside the pool");
        kept[group].push_back(size_t(*held));
      }
    }
    return engine->engine.grow(counts, kept) ? 0 : fail(error, CAVECTL_MEMORY, "the system gave no memory for the cache");
  });
}

int32_t cavectl_step(cavectl_engine* engine, const int64_t* words, int64_t word_count, const double* numbers,
                                    int64_t number_count, const uint8_t* masks, int64_t mask_bytes, int32_t max_rows, int32_t* drawn,
                                    int32_t max_draws, int32_t* status, int32_t* token, double* logprob, int32_t max_top,
                                    int32_t* top_count, int32_t* top_ids, double* top_logprobs, char* error) {
  return guarded(error, [&]() -> int32_t {
    cavectl::Step& step = engine->step;
    step.closed.clear();
    step.opened.clear();
    step.copies.clear();
    step.tokens.clear();
    step.page_numbers.clear();
    step.rows.clear();
    const std::string wrong = engine->engine.read_step(words, word_count, numbers, number_count, masks, mask_bytes, step);
    if (!wrong.empty()) return fail(error, CAVECTL_INVALID, wrong.c_str());
    if (step.rows.size() > size_t(max_rows < 0 ? 0 : max_rows)) return fail(error, CAVECTL_INVALID, "more rows than room for results");
    size_t most = 0;
    for (const cavectl::StepRow& row : step.rows) most += row.most_draws();
    if (most > size_t(max_draws < 0 ? 0 : max_draws)) return fail(error, CAVECTL_INVALID, "more draws than room for results");
    if (!engine->engine.run(step, engine->samples)) return fail(error, CAVECTL_MEMORY, "the system gave no memory for the step");
    size_t n = 0;
    for (size_t r = 0; r < step.rows.size(); ++r) {
      const cavectl::StepRow& row = step.rows[r];
      const cavectl::Slot* slot = engine->engine.slot(row.slot);
      drawn[r] = int32_t(row.draws);
      for (size_t draw = row.first_draw; draw < row.first_draw + row.draws; ++draw, ++n) {
        const cavectl::Sample& sample = engine->samples[draw];
        status[n] = sample.status;
        token[n] = sample.token;
        logprob[n] = slot->params.logprobs >= 0 ? sample.logprob : __builtin_nan("");
        const size_t count = std::min(sample.top.size(), size_t(max_top < 0 ? 0 : max_top));
        top_count[n] = int32_t(count);
        for (size_t i = 0; i < count; ++i) {
          top_ids[n * size_t(max_top) + i] = sample.top[i].first;
          top_logprobs[n * size_t(max_top) + i] = sample.top[i].second;
        }
      }
    }
    return 0;
  });
}

int32_t cavectl_keep_logits(cavectl_engine* engine, int32_t on) {
  engine->engine.keep_logits = on != 0;
  return 0;
}

int64_t cavectl_logits(cavectl_engine* engine, float* target, int64_t rows) {
  size_t kept = 0;
  const float* from = engine->engine.kept_logits(kept);
  const size_t vocab = engine->engine.model().vocab, width = cavectl::padded(vocab);
  if (target && rows >= 0) {
    for (size_t r = 0; r < kept && r < size_t(rows); ++r) memcpy(target + r * vocab, from + r * width, vocab * sizeof(float));
  }
  return int64_t(kept);
}

int64_t cavectl_resident_bytes(cavectl_engine* engine) { return int64_t(engine->engine.resident_bytes()); }

}  // extern "C"
