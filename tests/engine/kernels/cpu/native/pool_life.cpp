// Random runs of a pool: every unit of every phase is done once, after all units of the phase before, whoever comes and goes.
//
//   pool_life THREADS RUNS     prints how many units helpers did, then "ok"
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pool.h"

using cavectl::Pool;

namespace {

struct Run {
  Pool& pool;
  std::vector<size_t> totals, sizes;
  std::vector<std::vector<uint32_t>> done;  // of each phase and unit, how often; plain, so that a race on them is a race
  std::vector<int> slow;                    // phases whose pieces take longer than a turn
  std::vector<size_t> helped;               // units of each worker
  std::atomic<bool> wrong{false};

  void work(Pool::Lane& lane) {
    size_t before = totals.size();
    for (size_t phase = 0; phase < totals.size(); ++phase) {
      pool.share(lane, totals[phase], sizes[phase], [&](size_t first, size_t end) {
        if (before < totals.size()) {
          for (uint32_t count : done[before]) {
            if (count != 1) wrong = true;
          }
        }
        if (slow[phase]) {
          const auto until = Pool::Clock::now() + std::chrono::microseconds(1200);
          while (Pool::Clock::now() < until) {}
        }
        for (size_t i = first; i < end; ++i) ++done[phase][i];
        helped[size_t(lane.worker)] += end - first;
      });
      if (totals[phase]) before = phase;
    }
  }
};

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  const int threads = atoi(words[1]), runs = atoi(words[2]);
  std::mt19937 random{7};
  const auto below = [&](size_t limit) { return size_t(random() % limit); };
  size_t helped = 0, most_phases = 0;
  Pool pool(threads);
  for (int number = 0; number < runs; ++number) {
    Run run{pool, {}, {}, {}, {}, std::vector<size_t>(size_t(threads))};
    const size_t phases = below(30);
    for (size_t phase = 0; phase < phases; ++phase) {
      run.totals.push_back(below(5) ? below(60) : 0);
      run.sizes.push_back(1 + below(9));
      run.done.emplace_back(run.totals.back());
      run.slow.push_back(below(400) == 0);
    }
    most_phases = phases > most_phases ? phases : most_phases;
    pool.reserve_phases(most_phases);
    pool.run([](void* context, Pool::Lane& lane) { static_cast<Run*>(context)->work(lane); }, &run);
    for (const auto& phase : run.done) {
      for (uint32_t times : phase) {
        if (times != 1) run.wrong = true;
      }
    }
    for (size_t worker = 1; worker < run.helped.size(); ++worker) helped += run.helped[worker];
    if (run.wrong) {
      printf("run %d went wrong\n", number);
      return 1;
    }
    if (below(50) == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // helpers fall asleep
  }
  printf("%zu\nok\n", helped);
}
