#include "pool.h"

#include <chrono>

namespace cavectl {

namespace {

constexpr int kSpins = 64;            // pauses between two looks at the clock
constexpr auto kSpinTime = std::chrono::microseconds(30);

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
  try {
    for (int worker = 1; worker < threads_; ++worker) others_.emplace_back([this, worker] { live(worker); });
  } catch (...) {
    threads_ = int(others_.size()) + 1;
    ending_ = true;
    start_.value.fetch_add(1);
    start_.wake_all();
    for (auto& thread : others_) thread.join();
    throw;
  }
}

Pool::~Pool() {
  ending_ = true;
  start_.value.fetch_add(1);
  start_.wake_all();
  for (auto& thread : others_) thread.join();
}

void Pool::reserve_phases(size_t count) {
  if (count <= phases_) return;
  counters_ = std::make_unique<Counter[]>(count);
  phases_ = count;
}

void Pool::wait_for(SleepWord& word, uint32_t seen) {
  const auto begun = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (word.value.load(std::memory_order_acquire) != seen) return;
      pause_spin();
    }
  } while (std::chrono::steady_clock::now() - begun < kSpinTime);
  sleepers_.fetch_add(1);
  while (word.value.load() == seen) word.sleep_while(seen);
  sleepers_.fetch_sub(1);
}

void Pool::live(int worker) {
  uint32_t seen = 0;
  for (;;) {
    wait_for(start_, seen);
    seen = start_.value.load(std::memory_order_acquire);
    if (ending_) return;
    work_(context_, worker);
    barrier();
  }
}

void Pool::run(void (*work)(void*, int), void* context) {
  for (size_t i = 0; i < phases_; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
  work_ = work;
  context_ = context;
  start_.value.fetch_add(1);
  if (sleepers_.load()) start_.wake_all();
  work(context, 0);
  barrier();
}

void Pool::barrier() {
  if (threads_ == 1) return;
  const uint32_t seen = met_.value.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    met_.value.fetch_add(1);
    if (sleepers_.load()) met_.wake_all();
  } else {
    wait_for(met_, seen);
  }
}

bool Pool::claim(size_t phase, size_t total, size_t size, size_t& first, size_t& end) {
  if (threads_ == 1) {  // all at once, once
    if (counters_[phase].next.exchange(1, std::memory_order_relaxed)) return false;
    first = 0;
    end = total;
    return total > 0;
  }
  first = counters_[phase].next.fetch_add(size, std::memory_order_relaxed);
  if (first >= total) return false;
  end = first + size < total ? first + size : total;
  return true;
}

}  // namespace cavectl
