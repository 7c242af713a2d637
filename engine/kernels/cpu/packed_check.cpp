// The one check of a packed file. Invariant: reads the header and the records alone, and none of them beyond `bytes`.
#include "packed_check.h"

#include <cstring>

#include "abi_error.h"
#include "cavectl.h"
#include "formats.h"

namespace cavectl {
namespace {

const char* header_error(const FileHeader& header, uint64_t bytes) {
  if (std::memcmp(header.magic, "CAVEPACK", sizeof header.magic) != 0) return "not a packed file";
  if (header.version != kPackedVersion) return "the packed file has another version";
  if (header.file_bytes != bytes) return "the packed file is not as long as it says";
  if (header.reserved != 0) return "the packed file's header has a reserved field that is not zero";
  if (header.tensors < 1 || header.tensors > (bytes - sizeof header) / sizeof(TensorRecord)) {
    return "the packed file has no room for its records";
  }
  const uint64_t end = sizeof header + header.tensors * sizeof(TensorRecord);
  if (header.meta_offset != end || header.meta_bytes > bytes - end) return "the packed file's description is out of place";
  return nullptr;
}

const char* record_error(const TensorRecord& record, uint64_t expected_offset, uint64_t bytes) {
  if (!is_shape(record.kind, record.rows, record.columns)) return "a packed tensor has an impossible kind or shape";
  if (record.exponent < -kMostExponent || record.exponent > kMostExponent) return "a packed tensor's exponent is out of range";
  if (!is_integer(record.kind) && record.exponent != 0) return "a packed tensor of floats has an exponent";
  if (record.reserved != 0) return "a packed tensor has a reserved field that is not zero";
  if (record.bytes != tensor_bytes(record.kind, record.rows, record.columns)) return "a packed tensor has another size than its shape";
  if (record.offset != expected_offset) return "a packed tensor is out of place";
  if (record.offset > bytes || record.bytes > bytes - record.offset) return "a packed tensor reaches beyond the file";
  return nullptr;
}

}  // namespace

const char* validate_packed(const void* data, uint64_t bytes) {
  FileHeader header;
  if (!data || bytes < sizeof header) return "too short for a packed file";
  std::memcpy(&header, data, sizeof header);
  if (const char* wrong = header_error(header, bytes)) return wrong;
  uint64_t end = header.meta_offset + header.meta_bytes;
  for (uint32_t i = 0; i < header.tensors; ++i) {
    TensorRecord record;
    std::memcpy(&record, static_cast<const uint8_t*>(data) + sizeof header + i * sizeof record, sizeof record);
    const uint64_t expected = (end + kAlignment - 1) / kAlignment * kAlignment;
    if (const char* wrong = record_error(record, expected, bytes)) return wrong;
    end = record.offset + record.bytes;
  }
  return end == bytes ? nullptr : "the packed file does not end with its last tensor";
}

}  // namespace cavectl

int32_t cavectl_check_packed(const void* data, uint64_t bytes, char* error) {
  const char* wrong = cavectl::validate_packed(data, bytes);
  return wrong ? cavectl::fail(error, CAVECTL_INVALID, wrong) : 0;
}
