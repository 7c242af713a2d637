// One loaded model: its plan, its cache pages, its sampling slots, its threads and the memory a step works in.
//
//   words -> read_step (step_words.cpp): checked against the contract, nothing changed yet
//         -> Engine::run (step.cpp): slots, copies, every layer, head, sampling, on all threads
//         -> Engine::commit: sampled tokens join their slots
//
// Invariants: a step that is refused has changed nothing; one that was run has written only pages and slots of its own rows.
#pragma once
#include <memory>

#include "plan.h"
#include "pool.h"
#include "sampler.h"

namespace cavectl {

struct StepRow {
  size_t position = 0, start = 0, count = 0;  // its tokens are start .. start + count - 1 of the step
  std::vector<int32_t> parents;               // of its last tokens, which are drafts: one of them, or -1 for the last plain token
  size_t first_draw = 0, draws = 0;           // its samples; draws: how many there are after the step
  int32_t slot = -1;
  const uint8_t* mask = nullptr;
  std::vector<const int32_t*> pages;  // of each group

  size_t plain() const { return count - parents.size(); }
  size_t most_draws() const { return slot < 0 ? 0 : parents.size() + 1; }
};

struct PageCopy {
  size_t group, source, target;
};

struct OpenedSlot {
  int32_t index;
  Slot slot;
};

struct Step {
  std::vector<int32_t> closed;
  std::vector<OpenedSlot> opened;
  std::vector<PageCopy> copies;
  std::vector<int32_t> tokens;
  std::vector<int32_t> page_numbers;
  std::vector<StepRow> rows;
};

// The keys and values of one group of layers.
struct GroupCache {
  size_t pages = 0;
  std::vector<size_t> layers;
  std::vector<KvPlane> planes;  // of each of `layers`
};

// Memory from the system that only grows; what it holds is lost when it does.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { release(at_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  bool need(size_t bytes) {
    if (bytes <= bytes_) return true;
    release(at_, bytes_);
    at_ = reserve(bytes);
    bytes_ = at_ ? bytes : 0;
    return at_ != nullptr;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(at_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* at_ = nullptr;
  size_t bytes_ = 0;
};

struct Workspace {
  Buffer x, q, k, v, mixed, h, logits, rope, partial;
  Buffer f, i8, d, s, s16, i, i16;  // the activations of all tokens
  size_t bytes() const;
};

struct StepRun;

class Engine {
 public:
  // Throws std::bad_alloc or std::system_error where memory or threads cannot be had.
  Engine(Model model, const Kernels& kernels, int threads, const std::vector<size_t>& pages);
  ~Engine();

  // Fills `step`, or says what is wrong with the words.
  std::string read_step(const int64_t* words, int64_t word_count, const double* numbers, int64_t number_count,
                        const uint8_t* masks, int64_t mask_bytes, Step& step) const;

  // False when there is no memory for it: then nothing has happened.
  bool run(Step& step, std::vector<Sample>& samples);

  // False when there is no memory; then all is as it was. held: pages to be kept, of each group.
  bool grow(const std::vector<size_t>& pages, const std::vector<std::vector<size_t>>& held);

  const Model& model() const { return model_; }
  const Slot* slot(int64_t index) const { return index >= 0 && size_t(index) < slots_.size() ? &slots_[size_t(index)] : nullptr; }
  size_t groups() const { return caches_.size(); }
  size_t pages(size_t group) const { return caches_[group].pages; }
  size_t resident_bytes() const;

  bool keep_logits = false;
  const float* kept_logits(size_t& rows) const;

 private:
  friend struct StepRun;

  bool allocate(const std::vector<size_t>& pages, std::vector<GroupCache>& caches) const;
  void release_planes(std::vector<GroupCache>& caches) const;
  void copy_pages(const std::vector<PageCopy>& copies);
  void prepare_slots(const Step& step);
  void take_draws(const Step& step, const std::vector<Sample>& samples);
  bool prepare(const Step& step, size_t sampled);

  Model model_;
  const Kernels& kernels_;
  Pool pool_;
  std::vector<GroupCache> caches_;
  std::vector<size_t> plane_of_layer_;
  std::vector<Slot> slots_;
  Workspace work_;
  std::vector<SampleScratch> scratch_;  // of each thread
  struct Private;                       // what each thread works in alone
  std::vector<std::unique_ptr<Private>> private_;
  size_t logit_rows_ = 0;
};

}  // namespace cavectl
