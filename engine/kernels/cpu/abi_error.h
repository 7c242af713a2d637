// How a function of the C ABI says what is wrong: its code, and a line for a person in the caller's buffer.
#pragma once
#include <cstdint>
#include <cstring>

#include "cavectl.h"

namespace cavectl {

inline int32_t fail(char* error, int32_t code, const char* message) {
  if (error) {
    std::strncpy(error, message, CAVECTL_ERROR_BYTES - 1);
    error[CAVECTL_ERROR_BYTES - 1] = 0;
  }
  return code;
}

}  // namespace cavectl
