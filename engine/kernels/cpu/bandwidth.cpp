// How fast this machine reads memory: the floor under every decode step, measured in the same run as the step.
//
// Owned here: cavectl_read_bandwidth. Not here: what a step has to read (engine/bench/floor.py). Invariant: every byte that is counted
// was read in the time that is counted, and the sums are used, so that no read can be left out.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "abi_error.h"
#include "cavectl.h"

namespace {

using cavectl::fail;

constexpr uint64_t kLines = 4 * 64;  // bytes: a line of memory for each stream of `sum`

// Four streams, because a core's prefetchers follow several, each fetched a kilobyte ahead; eight lanes each, which the compiler puts
// into vector registers.
uint64_t sum(const uint64_t* words, size_t count) {
  constexpr size_t kStreams = 4, kLanes = 8, kAhead = 128;
  uint64_t sums[kStreams][kLanes] = {};
  const size_t part = count / kStreams;
  for (size_t i = 0; i < part; i += kLanes)
    for (size_t stream = 0; stream < kStreams; ++stream) {
      const uint64_t* line = words + stream * part;
      __builtin_prefetch(line + std::min(i + kAhead, part - kLanes));
      for (size_t lane = 0; lane < kLanes; ++lane) sums[stream][lane] += line[i + lane];
    }
  uint64_t total = 0;
  for (const auto& lanes : sums)
    for (uint64_t lane : lanes) total += lane;
  return total;
}

// All threads start a repeat together; a generation that never comes back lets the same gate serve every repeat.
class Gate {
 public:
  explicit Gate(int threads) : threads_(threads) {}

  void meet() {
    const int seen = generation_.load();
    if (arrived_.fetch_add(1) + 1 == threads_) {
      arrived_.store(0);
      generation_.fetch_add(1);
      return;
    }
    while (generation_.load() == seen) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<int> generation_{0};
};

struct Measurement {
  Measurement(uint64_t bytes, int threads, int repeats, double* figures)
      : words(bytes / threads / kLines * (kLines / sizeof(uint64_t))), threads(threads), repeats(repeats), figures(figures),
        gate(threads) {}

  const size_t words;  // of each thread
  const int threads, repeats;
  double* const figures;
  Gate gate;
  std::atomic<bool> short_of_memory{false};
  std::atomic<uint64_t> checksum{0};
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void work(Measurement& m, int worker) {
  std::unique_ptr<uint64_t[]> part(new (std::nothrow) uint64_t[m.words]);
  if (part) {
    std::memset(part.get(), 1, m.words * sizeof(uint64_t));
  } else {
    m.short_of_memory.store(true);
  }
  m.gate.meet();
  if (m.short_of_memory.load()) return;
  for (int repeat = 0; repeat < m.repeats; ++repeat) {
    m.gate.meet();
    const auto start = std::chrono::steady_clock::now();
    m.checksum.fetch_add(sum(part.get(), m.words));
    m.gate.meet();
    if (worker == 0) m.figures[repeat] = double(m.words) * sizeof(uint64_t) * m.threads / seconds_since(start);
  }
}

// Starts the others and works itself. Threads that wait at the gate for one that cannot be had would wait for ever: so they are all
// held back until all are there.
int32_t measure(Measurement& m, char* error) {
  std::atomic<int> go{0};
  std::vector<std::thread> others;
  bool complete = true;
  try {
    others.reserve(m.threads - 1);
    for (int worker = 1; worker < m.threads; ++worker)
      others.emplace_back([&m, &go, worker] {
        while (go.load() == 0) std::this_thread::yield();
        if (go.load() > 0) work(m, worker);
      });
  } catch (const std::exception&) {
    complete = false;
  }
  go.store(complete ? 1 : -1);
  if (complete) work(m, 0);
  for (std::thread& other : others) other.join();
  if (!complete) return fail(error, CAVECTL_MEMORY, "the system gave no thread to measure with");
  if (m.short_of_memory.load()) return fail(error, CAVECTL_MEMORY, "the system gave no memory to measure with");
  const uint64_t word = 0x0101010101010101u;
  if (m.checksum.load() != word * m.words * m.threads * m.repeats) return fail(error, CAVECTL_INTERNAL, "memory was misread");
  return 0;
}

}  // namespace

int32_t cavectl_read_bandwidth(uint64_t bytes, int32_t threads, int32_t repeats, double* bytes_per_second, char* error) {
  if (threads < 1 || threads > 4096 || repeats < 1 || bytes / kLines < uint64_t(threads))
    return fail(error, CAVECTL_INVALID, "a bandwidth is measured with 1 to 4096 threads, once or more, over 256 bytes each or more");
  Measurement measurement(bytes, threads, repeats, bytes_per_second);
  return measure(measurement, error);
}
