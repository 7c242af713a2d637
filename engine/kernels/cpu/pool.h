// The threads of one engine: all run the same function over a step and claim the pieces of its phases between them.
//
// The caller is worker 0; the others help. A phase is over when its pieces are done, whoever did them: a helper that has no piece is
// waited for by nobody. So a busy neighbour takes a share of a core, never the whole step: helpers come and go in the middle of a
// run, and give their core up between two pieces rather than have it taken in the middle of one. Waiting is a bounded spin, then
// sleep. Invariants: who computes a piece never changes what is computed; pieces of a phase are independent; what
// a phase reads is to be read once a piece of it is claimed: until that piece is done, no later phase can begin.
#pragma once
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "os.h"

namespace cavectl {

class Pool {
 public:
  using Clock = std::chrono::steady_clock;

  // A worker's way through the phases of a run.
  struct Lane {
    int worker = 0;
    Clock::time_point turn_end{};  // when it gives its core up, if anybody wants it
    size_t phase = 0;
    uint32_t seen = 0;     // progress when it last looked
    bool leaving = false;  // a helper on its way out: the rest of the phases are the others'
    bool waited = false;   // it leaves because it found nothing to do
  };

  explicit Pool(int threads);  // throws std::system_error where threads cannot be had
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs work(context, lane) on every worker that is free, and returns when all phases are over and nobody is in it any more.
  void run(void (*work)(void*, Lane&), void* context);

  // Inside `run`: the next phase. Does piece(first, end) for parts of [0, total), of `size` at most, until none is left, and returns
  // when all are done. Every worker comes through the same phases in the same order.
  template <typename Piece>
  void share(Lane& lane, size_t total, size_t size, Piece&& piece) {
    if (total == 0) return;
    if (threads_ == 1) {
      piece(size_t(0), total);
      return;
    }
    const size_t phase = lane.phase++;
    if (lane.leaving || passed(lane, phase)) return;
    for (bool over = true; over;) {
      over = false;
      size_t first, end, mine = 0;
      while (!over && claim(phase, total, size, first, end)) {
        piece(first, end);
        mine += end - first;
        over = Clock::now() > lane.turn_end;
      }
      if (mine) finish(phase, mine, total);
      if (over && !give_way(lane)) return;
    }
    wait(lane, phase);
  }

  // Room for so many phases in a run; to be called outside of one.
  void reserve_phases(size_t count);

 private:
  struct alignas(64) Phase {
    std::atomic<size_t> claimed{0};
    std::atomic<size_t> done{0};
  };

  bool passed(Lane& lane, size_t phase) const {
    lane.seen = progress_.value.load(std::memory_order_acquire);
    return int32_t(lane.seen - base_) > int32_t(phase);
  }

  bool claim(size_t phase, size_t total, size_t size, size_t& first, size_t& end) {
    first = phases_[phase].claimed.fetch_add(size, std::memory_order_relaxed);
    if (first >= total) return false;
    end = first + size < total ? first + size : total;
    return true;
  }

  bool give_way(Lane& lane);
  void finish(size_t phase, size_t mine, size_t total);
  void wait(Lane& lane, size_t phase);
  bool enter();
  void leave();
  void live(int worker);
  void end_helpers();
  template <typename Done>
  bool spin(Done&& done);
  void sleep_until_moved(SleepWord& word, uint32_t seen);

  int threads_;
  std::vector<std::thread> helpers_;
  std::unique_ptr<Phase[]> phases_;
  size_t phase_count_ = 0;
  void (*work_)(void*, Lane&) = nullptr;
  void* context_ = nullptr;
  uint32_t base_ = 0;  // progress when the run began
  std::atomic<bool> ending_{false};
  alignas(64) SleepWord progress_;  // counts phases that are over, and beginnings of runs
  alignas(64) SleepWord left_;      // counts times that the last helper left after a run was over
  alignas(64) std::atomic<uint32_t> inside_{0};  // helpers in a run, and kOpen while they may come
  alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace cavectl
