// A small model of random numbers for the native test programs: its packed file and its plan, byte by byte as a loader makes them.
//
// Owned here: laying out both by formats.h and plan.h. Not here: any use of them. Invariant: both buffers have exactly the bytes
// that they need, so that a sanitizer sees the first one too many.
#pragma once
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "plan.h"

namespace tiny {

using namespace cavectl;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }
  uint64_t below(uint64_t n) { return (next() >> 16) % n; }
  float number() { return float(below(1u << 20)) / float(1u << 19) - 1.0f; }  // -1 .. 1
 private:
  uint64_t state_;
};

// Aligned as a mapped file is, and exactly so long.
class Bytes {
 public:
  Bytes() = default;
  explicit Bytes(size_t size) : size_(size) {
    if (posix_memalign(&at_, kAlignment, size ? size : 1) != 0) abort();
    memset(at_, 0, size);
  }
  Bytes(const Bytes& other) : Bytes(other.size_) { copy(other); }
  Bytes(Bytes&& other) noexcept : at_(other.at_), size_(other.size_) { other.at_ = nullptr; }
  Bytes& operator=(Bytes other) {
    std::swap(at_, other.at_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Bytes() { free(at_); }
  uint8_t* data() const { return static_cast<uint8_t*>(at_); }
  size_t size() const { return size_; }
  Bytes first(size_t count) const {
    Bytes out(count);
    if (count) memcpy(out.at_, at_, count);
    return out;
  }

 private:
  void copy(const Bytes& other) {
    if (size_) memcpy(at_, other.at_, size_);
  }
  void* at_ = nullptr;
  size_t size_ = 0;
};

struct LayerShape {
  uint32_t heads, kv_heads, head_dim, group;
};

struct Shape {
  uint32_t vocab = 97, hidden = 64, ffn = 96;
  std::vector<LayerShape> layers = {{4, 2, 16, 0}, {4, 2, 16, 0}};
  std::vector<uint32_t> windows = {0};
  std::vector<uint32_t> kinds = {kQ4_M};  // of the matrices, in turn
  uint32_t embed_kind = kQ8_S;
  uint32_t kv_type = kKvF16, activation = kSilu, max_slots = 6;
  bool gated = true, biases = false, tied = true, rotary = true;
  float logit_scale = 1;
};

struct TinyModel {
  Shape shape;
  Bytes packed, plan;
};

// Collects tensors, then writes the file.
class PackedWriter {
 public:
  explicit PackedWriter(Random& random) : random_(random) {}

  int32_t matrix(uint32_t kind, uint64_t rows, uint64_t columns) {
    TensorRecord record{};
    record.kind = kind;
    record.rows = rows;
    record.columns = columns;
    record.bytes = tensor_bytes(kind, rows, columns);
    records_.push_back(record);
    return int32_t(records_.size()) - 1;
  }
  int32_t vector(uint64_t length) { return matrix(kVectorF32, 1, length); }

  Bytes write() {
    FileHeader header{};
    memcpy(header.magic, "CAVEPACK", 8);
    header.version = kPackedVersion;
    header.tensors = uint32_t(records_.size());
    header.meta_offset = sizeof header + records_.size() * sizeof(TensorRecord);
    header.meta_bytes = 2;
    uint64_t end = header.meta_offset + header.meta_bytes;
    for (TensorRecord& record : records_) {
      record.offset = (end + kAlignment - 1) / kAlignment * kAlignment;
      end = record.offset + record.bytes;
    }
    header.file_bytes = end;
    Bytes out(end);
    memcpy(out.data(), &header, sizeof header);
    memcpy(out.data() + sizeof header, records_.data(), records_.size() * sizeof(TensorRecord));
    memcpy(out.data() + header.meta_offset, "{}", 2);
    for (const TensorRecord& record : records_) fill(record, out.data() + record.offset);
    return out;
  }

 private:
  static void put_half(uint8_t* at, uint32_t exponent, uint64_t bits) {  // +-2^(exponent - 15) * 1.fraction
    const uint16_t half = uint16_t((bits & 1) << 15 | exponent << 10 | (bits >> 1 & 1023));
    memcpy(at, &half, 2);
  }

  void fill(const TensorRecord& record, uint8_t* at) {
    if (record.kind == kVectorF32 || record.kind == kF32) {
      for (size_t i = 0; i + 4 <= record.bytes; i += 4) {
        const float value = record.kind == kVectorF32 ? 1 + random_.number() / 2 : random_.number() / 4;
        memcpy(at + i, &value, 4);
      }
    } else if (record.kind == kF16) {
      for (size_t i = 0; i + 2 <= record.bytes; i += 2) put_half(at + i, 12, random_.next());
    } else if (record.kind == kBF16) {
      for (size_t i = 0; i + 2 <= record.bytes; i += 2) {
        const uint16_t value = uint16_t((random_.next() & 0x807f) | 0x3e00);  // about a quarter
        memcpy(at + i, &value, 2);
      }
    } else {
      const size_t block = block_bytes(record.kind), numbers = size_t(kPanelRows) * kBlockColumns * kKindInfo[record.kind].bits / 8;
      const uint32_t exponent = kKindInfo[record.kind].bits == 4 ? 9 : 5;
      for (size_t i = 0; i < record.bytes; ++i) at[i] = uint8_t(random_.next());
      for (size_t start = 0; start < record.bytes; start += block) {
        for (size_t i = numbers; i < block; i += 2) put_half(at + start + i, exponent, random_.next());
      }
    }
  }

  Random& random_;
  std::vector<TensorRecord> records_;
};

inline PlanLayer layer_record(PackedWriter& writer, const Shape& shape, const LayerShape& layer, size_t& turn) {
  const uint64_t wide = uint64_t(layer.heads) * layer.head_dim, narrow = uint64_t(layer.kv_heads) * layer.head_dim;
  const auto matrix = [&](uint64_t rows, uint64_t columns) {
    const uint32_t kind = shape.kinds[turn++ % shape.kinds.size()];
    return writer.matrix(is_integer(kind) && columns % kBlockColumns ? uint32_t(kF16) : kind, rows, columns);
  };
  const auto bias = [&](uint64_t rows) { return shape.biases ? writer.vector(rows) : kAbsent; };
  PlanLayer p{};
  p.q = matrix(wide, shape.hidden);
  p.k = matrix(narrow, shape.hidden);
  p.v = matrix(narrow, shape.hidden);
  p.o = matrix(shape.hidden, wide);
  p.gate = shape.gated ? matrix(shape.ffn, shape.hidden) : kAbsent;
  p.up = matrix(shape.ffn, shape.hidden);
  p.down = matrix(shape.hidden, shape.ffn);
  p.q_bias = bias(wide);
  p.k_bias = bias(narrow);
  p.v_bias = bias(narrow);
  p.o_bias = bias(shape.hidden);
  p.gate_bias = shape.gated ? bias(shape.ffn) : kAbsent;
  p.up_bias = bias(shape.ffn);
  p.down_bias = bias(shape.hidden);
  p.mixer_norm = writer.vector(shape.hidden);
  p.ffn_norm = writer.vector(shape.hidden);
  p.heads = layer.heads;
  p.kv_heads = layer.kv_heads;
  p.head_dim = layer.head_dim;
  p.group = layer.group;
  p.rope = shape.rotary ? 0 : kAbsent;
  p.activation = shape.activation;
  p.scale = 0.3f;
  p.mixer_epsilon = p.ffn_epsilon = 1e-5f;
  return p;
}

template <typename T>
void append(std::vector<uint8_t>& out, const T& record) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(&record);
  out.insert(out.end(), at, at + sizeof record);
}

inline TinyModel make(const Shape& shape, uint64_t seed) {
  Random random(seed);
  PackedWriter writer(random);
  PlanHeader header{};
  memcpy(header.magic, "CAVEPLAN", 8);
  header.version = kPlanVersion;
  header.vocab = shape.vocab;
  header.hidden = shape.hidden;
  header.layers = uint32_t(shape.layers.size());
  header.groups = uint32_t(shape.windows.size());
  header.ropes = shape.rotary ? 1 : 0;
  header.frequencies = shape.rotary ? 4 : 0;
  header.kv_type = shape.kv_type;
  header.max_slots = shape.max_slots;
  header.embed = writer.matrix(shape.embed_kind, shape.vocab, shape.hidden);
  header.head = shape.tied ? header.embed : writer.matrix(shape.kinds[0], shape.vocab, shape.hidden);
  header.final_norm = writer.vector(shape.hidden);
  header.embedding_scale = 1;
  header.logit_scale = shape.logit_scale;
  header.final_epsilon = 1e-5f;
  std::vector<uint8_t> body;
  for (uint32_t window : shape.windows) append(body, PlanGroup{window, 0});
  if (shape.rotary) append(body, PlanRope{1.0, 8, 0});
  size_t turn = 0;
  for (const LayerShape& layer : shape.layers) append(body, layer_record(writer, shape, layer, turn));
  for (double frequency = 1; shape.rotary && frequency > 0.0005; frequency /= 10) append(body, frequency);
  header.bytes = uint32_t(sizeof header + body.size());
  TinyModel model{shape, writer.write(), Bytes(header.bytes)};
  memcpy(model.plan.data(), &header, sizeof header);
  memcpy(model.plan.data() + sizeof header, body.data(), body.size());
  return model;
}

// One of each thing that a model can have, spread over a few small ones.
inline std::vector<Shape> shapes() {
  Shape plain, windowed, mixed, floats;
  windowed.layers = {{4, 2, 16, 0}, {6, 2, 20, 1}, {4, 2, 16, 1}};
  windowed.windows = {0, 20};
  windowed.kinds = {kQ4_S, kQ8_S16, kQ4_M16};
  windowed.kv_type = kKvInt8;
  windowed.biases = true;
  windowed.activation = kGeluTanh;
  mixed.layers = {{8, 4, 8, 0}, {5, 1, 40, 0}, {4, 2, 16, 0}};  // heads that differ in one group
  mixed.kinds = {kQ8_S, kQ8_M, kF16, kBF16, kQ4_M};
  mixed.kv_type = kKvF32;
  mixed.tied = false;
  mixed.embed_kind = kBF16;
  mixed.logit_scale = 0.5f;
  floats.vocab = 33;
  floats.hidden = 50;
  floats.ffn = 41;
  floats.kinds = {kF32, kBF16, kF16};
  floats.embed_kind = kF32;
  floats.gated = floats.rotary = false;
  floats.activation = kRelu;
  return {plain, windowed, mixed, floats};
}

}  // namespace tiny
