// Which kernels this machine runs: asked at run time, never assumed from the machine that built the library.
#include <cstring>
#include <string>

#include "kernels.h"
#include "os.h"

namespace cavectl {

#if defined(__x86_64__)
const Kernels* kernels_avx512_table();
const Kernels* kernels_avx2_table();
#elif defined(__aarch64__)
const Kernels* kernels_neon_table();
#endif
const Kernels* kernels_scalar_table();

namespace {

struct Choice {
  bool runs;
  const Kernels* kernels;
};

constexpr int kMostChoices = 3;

int choices(Choice (&found)[kMostChoices]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  found[count++] = {avx512, kernels_avx512_table()};
  found[count++] = {avx2, kernels_avx2_table()};
#elif defined(__aarch64__)
  found[count++] = {has_dot_products(), kernels_neon_table()};
#endif
  found[count++] = {true, kernels_scalar_table()};
  return count;
}

}  // namespace

const Kernels* choose_kernels(const char* name) {
  Choice found[kMostChoices];
  const int count = choices(found);
  for (int i = 0; i < count; ++i) {
    if (found[i].runs && (!*name || !strcmp(name, found[i].kernels->name))) return found[i].kernels;
  }
  return nullptr;
}

int list_kernels(const char** names, int room) {
  Choice found[kMostChoices];
  const int count = choices(found);
  int listed = 0;
  for (int i = 0; i < count && listed < room; ++i) {
    if (found[i].runs) names[listed++] = found[i].kernels->name;
  }
  return listed;
}

}  // namespace cavectl
