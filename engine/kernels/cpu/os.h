// The system calls of the CPU backend that differ between Linux and macOS: sleeping on a word, pausing in a spin, reserving memory,
// asking what an ARM machine can do.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cavectl {

inline void pause_spin() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__aarch64__)
// Whether the machine has the dot products and float16 arithmetic of ARMv8.2, which the neon kernels are compiled for.
inline bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long kNeeds = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
  return (getauxval(AT_HWCAP) & kNeeds) == kNeeds;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  // macOS 11 does not know the name; it runs on chips that all have them
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) != 0 || has != 0;
#else
  return false;
#endif
}
#endif

// A 32-bit word that threads may sleep on.
class SleepWord {
 public:
  std::atomic<uint32_t> value{0};

  // Returns when the word is not `seen` any more, or now and then for no reason.
  void sleep_while(uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return value.load() != seen; });
#endif
  }

  void wake_all() {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
#endif
  }

 private:
#if !defined(__linux__)
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

#if defined(__SANITIZE_ADDRESS__)
#define CAVECTL_WATCHED_MEMORY 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CAVECTL_WATCHED_MEMORY 1
#endif
#endif

#if defined(CAVECTL_WATCHED_MEMORY)
// As below, from the heap: there the sanitizer sees every byte behind the end.
inline void* reserve(size_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 64, bytes ? bytes : 1) != 0) return nullptr;
  return memset(at, 0, bytes);
}

inline void release(void* at, size_t) { free(at); }
#else
// Zeroed memory that costs nothing until it is written; null when the system refuses.
inline void* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

inline void release(void* at, size_t bytes) {
  if (at) munmap(at, bytes ? bytes : 1);
}
#endif

}  // namespace cavectl
