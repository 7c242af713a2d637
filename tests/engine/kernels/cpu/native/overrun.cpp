// Reads one number too many inside of the library, or lets two threads write one page: what the sanitizers are there to see.
//
//   overrun memory | race
#include <cstring>

#include "step_words.h"
#include "tiny_model.h"

namespace {

int memory() {
  const std::vector<float> table(7);
  std::vector<float> x(16);
  return cavectl_op_rotate("", x.data(), table.data(), table.data(), 8, nullptr);
}

// Rows of one step that were given the same page.
int race() {
  const tiny::TinyModel model = tiny::make(tiny::Shape{}, 1);
  const int64_t pages[] = {4};
  tiny::Results results(8, 1);
  cavectl_engine* engine = cavectl_open(model.packed.data(), model.packed.size(), model.plan.data(), model.plan.size(), pages, 1, 3,
                                        "scalar", results.error);
  tiny::StepWriter step;
  for (int64_t row = 0; row < 8; ++row) step.rows.push_back({0, {row, row + 1, row + 2}, -1, -1, {}, {{0}}});
  for (int i = 0; i < 50; ++i) results.run(engine, step.write());
  cavectl_close(engine);
  return 0;
}

}  // namespace

int main(int count, char** arguments) { return count == 2 && !strcmp(arguments[1], "race") ? race() : memory(); }
