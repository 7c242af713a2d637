// What must hold of a packed file before anything of it is used.
#pragma once
#include <cstdint>

namespace cavectl {

// Null when the bytes are a packed file (formats.h) that the kernels may read, else what is wrong, a phrase. After it passes, every
// record's bytes lie inside of the file and are as many as its kind and shape say. The weights themselves are not looked at: any
// bytes are some numbers.
const char* validate_packed(const void* data, uint64_t bytes);

}  // namespace cavectl
