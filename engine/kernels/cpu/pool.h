// The threads of one engine: all run the same function over a step, meet at barriers, and claim pieces of work between them.
//
// The caller is worker 0. Waiting is a bounded spin, then sleep: a busy neighbour takes a core, never the whole step. Invariant: who
// computes a piece never changes what is computed; pieces of a phase are independent.
#pragma once
#include <memory>
#include <thread>
#include <vector>

#include "os.h"

namespace cavectl {

class Pool {
 public:
  explicit Pool(int threads);  // throws std::system_error where threads cannot be had
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs work(context, worker) on every worker and returns when all are done.
  void run(void (*work)(void*, int), void* context);

  // Inside `run`: returns when every worker has come here. `phase` is this worker's count of barriers so far.
  void barrier();

  // Inside `run`: the next piece [first, end) of `total`, of `size` at most, in phase `phase`; false when none is left. Every worker
  // passes the same phases in the same order, with a barrier between two that share work.
  bool claim(size_t phase, size_t total, size_t size, size_t& first, size_t& end);

  // Room for so many phases in a run; to be called outside of one.
  void reserve_phases(size_t count);

 private:
  struct alignas(64) Counter {
    std::atomic<size_t> next{0};
  };

  void live(int worker);
  void wait_for(SleepWord& word, uint32_t seen);

  int threads_;
  std::vector<std::thread> others_;
  std::unique_ptr<Counter[]> counters_;
  size_t phases_ = 0;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool ending_ = false;
  alignas(64) SleepWord start_;
  alignas(64) SleepWord met_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace cavectl
