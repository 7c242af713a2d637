// The engine around a step: its planes, its slots, growth.
#include "engine.h"

#include <cstring>

#include "slots.h"
#include "step_run.h"

namespace cavectl {

namespace {

size_t key_page_bytes(const KvPlane& p) { return p.kv_heads * key_head_bytes(p); }
size_t value_page_bytes(const KvPlane& p) { return p.kv_heads * value_head_bytes(p); }
size_t scale_page_bytes(const KvPlane& p) { return p.type == kKvInt8 ? p.kv_heads * kPageTokens * sizeof(uint16_t) : 0; }

// Calls f(pointer to the plane's part, bytes of a page) for each part that it has.
template <typename F>
void over_parts(KvPlane& plane, const F& f) {
  f(plane.k, key_page_bytes(plane));
  f(plane.v, value_page_bytes(plane));
  if (plane.type != kKvInt8) return;
  f(plane.k_scale, scale_page_bytes(plane));
  f(plane.v_scale, scale_page_bytes(plane));
}

}  // namespace

size_t Workspace::bytes() const {
  size_t sum = 0;
  for (const Buffer* b : {&x, &q, &k, &v, &mixed, &h, &logits, &rope, &partial, &f, &i8, &d, &s, &s16, &i, &i16}) sum += b->bytes();
  return sum;
}

Engine::Engine(Model model, const Kernels& kernels, int threads, const std::vector<size_t>& pages)
    : model_(std::move(model)), kernels_(kernels), pool_(threads) {
  std::vector<size_t> in_group(model_.windows.size());
  for (const Layer& layer : model_.layers) plane_of_layer_.push_back(in_group[layer.group]++);
  slots_.resize(model_.max_slots);
  scratch_.resize(size_t(pool_.threads()));
  for (SampleScratch& scratch : scratch_) scratch.grow(model_.vocab);
  for (int i = 0; i < pool_.threads(); ++i) private_.push_back(std::make_unique<Private>());
  if (!allocate(pages, caches_)) throw std::bad_alloc();
}

Engine::~Engine() { release_planes(caches_); }

bool Engine::allocate(const std::vector<size_t>& pages, std::vector<GroupCache>& caches) const {
  caches.clear();
  caches.resize(model_.windows.size());
  bool had = true;
  for (size_t group = 0; group < caches.size(); ++group) {
    caches[group].pages = pages[group];
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& layer = model_.layers[i];
      if (layer.group != group) continue;
      KvPlane plane;
      plane.type = model_.kv_type;
      plane.kv_heads = layer.kv_heads;
      plane.head_dim = layer.head_dim;
      plane.pages = pages[group];
      over_parts(plane, [&](uint8_t*& at, size_t bytes) {
        at = bytes && pages[group] > SIZE_MAX / 2 / bytes ? nullptr : static_cast<uint8_t*>(reserve(bytes * pages[group]));
        had = had && at;
      });
      caches[group].layers.push_back(i);
      caches[group].planes.push_back(plane);
    }
  }
  if (!had) release_planes(caches);
  return had;
}

void Engine::release_planes(std::vector<GroupCache>& caches) const {
  for (GroupCache& cache : caches) {
    for (KvPlane& plane : cache.planes) {
      over_parts(plane, [&](uint8_t*& at, size_t bytes) { release(at, bytes * plane.pages); });
    }
  }
  caches.clear();
}

// Each old plane goes as soon as it is copied, so that the pages held are there twice in one plane at most.
bool Engine::grow(const std::vector<size_t>& pages, const std::vector<std::vector<size_t>>& held) {
  std::vector<GroupCache> grown;
  if (!allocate(pages, grown)) return false;
  for (size_t group = 0; group < grown.size(); ++group) {
    for (size_t i = 0; i < grown[group].planes.size(); ++i) {
      KvPlane &to = grown[group].planes[i], &from = caches_[group].planes[i];
      uint8_t* targets[4] = {};
      int count = 0, at_part = 0;
      over_parts(to, [&](uint8_t*& at, size_t) { targets[count++] = at; });
      over_parts(from, [&](uint8_t*& at, size_t bytes) {
        for (size_t page : held[group]) memcpy(targets[at_part] + page * bytes, at + page * bytes, bytes);
        release(at, bytes * from.pages);
        at = nullptr;
        ++at_part;
      });
    }
  }
  caches_ = std::move(grown);
  return true;
}

void Engine::copy_pages(const std::vector<PageCopy>& copies) {
  for (const PageCopy& copy : copies) {
    for (KvPlane& plane : caches_[copy.group].planes) {
      over_parts(plane, [&](uint8_t*& at, size_t bytes) { memcpy(at + copy.target * bytes, at + copy.source * bytes, bytes); });
    }
  }
}

// All memory that drawing along a tree takes is taken here, by the caller's thread.
void Engine::prepare_slots(const Step& step) {
  for (const StepRow& row : step.rows) {
    if (row.parents.empty()) continue;
    Slot& slot = slots_[size_t(row.slot)];
    slot.tokens.reserve(slot.tokens.size() + row.most_draws());
    for (size_t i = row.plain(); i < row.count; ++i) slot.counts.try_emplace(step.tokens[row.start + i], 0);
  }
}

void Engine::take_draws(const Step& step, const std::vector<Sample>& samples) {
  for (const StepRow& row : step.rows) {
    if (row.slot < 0) continue;
    Slot& slot = slots_[size_t(row.slot)];
    for (size_t i = 0; i < row.draws; ++i) {
      const Sample& sample = samples[row.first_draw + i];
      if (sample.status == kSampled) slot.append(sample.token);
    }
    for (size_t i = row.plain(); i < row.count; ++i) {
      const auto found = slot.counts.find(step.tokens[row.start + i]);
      if (found != slot.counts.end() && !found->second) slot.counts.erase(found);
    }
  }
}

bool Engine::run(Step& step, std::vector<Sample>& samples) {
  size_t draws = 0;
  for (StepRow& row : step.rows) {
    row.first_draw = draws;
    draws += row.most_draws();
  }
  samples.assign(draws, Sample{});
  StepRun run(*this, step, samples);
  run.plan();
  logit_rows_ = 0;  // their memory may go
  if (!run.need_memory()) return false;
  run.need_top();
  pool_.reserve_phases(run.phases());
  for (int32_t slot : step.closed) slots_[size_t(slot)] = Slot{};
  for (OpenedSlot& opened : step.opened) slots_[size_t(opened.index)] = std::move(opened.slot);
  copy_pages(step.copies);
  prepare_slots(step);
  if (!step.rows.empty()) {
    pool_.run([](void* context, Pool::Lane& lane) { static_cast<StepRun*>(context)->work(lane); }, &run);
    logit_rows_ = run.wanted.size();
  }
  take_draws(step, samples);
  return true;
}

const float* Engine::kept_logits(size_t& rows) const {
  rows = keep_logits ? logit_rows_ : 0;
  return work_.logits.as<float>();
}

size_t Engine::resident_bytes() const {
  size_t sum = work_.bytes();
  for (const GroupCache& cache : caches_) {
    for (const KvPlane& plane : cache.planes) {
      sum += plane.pages * (key_page_bytes(plane) + value_page_bytes(plane) + 2 * scale_page_bytes(plane));
    }
  }
  return sum;
}

}  // namespace cavectl
