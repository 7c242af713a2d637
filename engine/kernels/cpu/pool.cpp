#include "pool.h"

namespace cavectl {

namespace {

constexpr int kSpins = 64;  // pauses between two looks at the clock
constexpr auto kSpinTime = std::chrono::microseconds(30);
constexpr uint32_t kOpen = 1u << 31;

// Shorter than the slice of any scheduler: who gives way so often is not stopped in the middle of a piece. Longer than switching costs.
constexpr auto kTurn = std::chrono::microseconds(1000);

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
  try {
    for (int worker = 1; worker < threads_; ++worker) helpers_.emplace_back([this, worker] { live(worker); });
  } catch (...) {
    end_helpers();
    throw;
  }
}

Pool::~Pool() { end_helpers(); }

void Pool::end_helpers() {
  ending_ = true;
  progress_.value.fetch_add(1);
  progress_.wake_all();
  for (auto& thread : helpers_) thread.join();
}

void Pool::reserve_phases(size_t count) {
  if (count <= phase_count_) return;
  phases_ = std::make_unique<Phase[]>(count);
  phase_count_ = count;
}

template <typename Done>
bool Pool::spin(Done&& done) {
  const auto begun = Clock::now();
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (done()) return true;
      pause_spin();
    }
  } while (Clock::now() - begun < kSpinTime);
  return done();
}

void Pool::sleep_until_moved(SleepWord& word, uint32_t seen) {
  sleepers_.fetch_add(1);
  while (word.value.load() == seen) word.sleep_while(seen);
  sleepers_.fetch_sub(1);
}

bool Pool::enter() {
  uint32_t inside = inside_.load(std::memory_order_relaxed);
  while (inside & kOpen) {
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  }
  return false;
}

void Pool::leave() {
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  left_.value.fetch_add(1);
  if (sleepers_.load()) left_.wake_all();
}

void Pool::live(int worker) {
  while (!ending_.load()) {
    uint32_t seen = progress_.value.load(std::memory_order_acquire);
    const bool entered = enter();
    if (entered) {
      Lane lane{worker, Clock::now() + kTurn};
      work_(context_, lane);
      leave();
      if (lane.leaving && !lane.waited) {
        std::this_thread::yield();
        continue;
      }
      seen = lane.seen;
    }
    const auto moved = [&] {
      const bool opened = !entered && (inside_.load(std::memory_order_relaxed) & kOpen);
      return opened || progress_.value.load(std::memory_order_acquire) != seen;
    };
    if (!spin(moved)) sleep_until_moved(progress_, seen);
  }
}

void Pool::run(void (*work)(void*, Lane&), void* context) {
  Lane lane{0, Clock::now() + kTurn};
  if (threads_ == 1) {
    work(context, lane);
    return;
  }
  for (size_t i = 0; i < phase_count_; ++i) {
    phases_[i].claimed.store(0, std::memory_order_relaxed);
    phases_[i].done.store(0, std::memory_order_relaxed);
  }
  work_ = work;
  context_ = context;
  base_ = progress_.value.load(std::memory_order_relaxed) + 1;
  progress_.value.store(base_);  // before anybody may end a phase
  inside_.store(kOpen, std::memory_order_release);
  if (sleepers_.load()) progress_.wake_all();
  work(context, lane);
  const uint32_t left = left_.value.load();
  if (inside_.fetch_and(~kOpen, std::memory_order_acq_rel) == kOpen) return;
  const auto empty = [&] { return inside_.load(std::memory_order_acquire) == 0; };
  if (!spin(empty)) {
    for (uint32_t seen = left; !empty(); seen = left_.value.load()) sleep_until_moved(left_, seen);
  }
}

// False: it is to leave. The caller gives way where it stands, since it may not leave.
bool Pool::give_way(Lane& lane) {
  if (lane.worker != 0) {
    lane.leaving = true;
    return false;
  }
  std::this_thread::yield();
  lane.turn_end = Clock::now() + kTurn;
  return true;
}

void Pool::finish(size_t phase, size_t mine, size_t total) {
  if (phases_[phase].done.fetch_add(mine, std::memory_order_acq_rel) + mine != total) return;
  progress_.value.store(base_ + uint32_t(phase) + 1);
  if (sleepers_.load()) progress_.wake_all();
}

void Pool::wait(Lane& lane, size_t phase) {
  if (spin([&] { return passed(lane, phase); })) return;
  if (lane.worker != 0) {
    lane.leaving = lane.waited = true;
    return;
  }
  while (!passed(lane, phase)) sleep_until_moved(progress_, lane.seen);
}

}  // namespace cavectl
