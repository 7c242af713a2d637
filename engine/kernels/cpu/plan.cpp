#include "plan.h"

#include <cmath>
#include <cstring>

namespace cavectl {

namespace {

constexpr uint32_t kMostLayers = 1024, kMostGroups = 64, kMostRopes = 64, kMostFrequencies = 1u << 20;
constexpr uint64_t kMostSize = 1u << 24;

class Reader {
 public:
  Reader(const void* plan, uint64_t plan_bytes, const void* packed) {
    plan_ = static_cast<const uint8_t*>(plan);
    plan_bytes_ = plan_bytes;
    packed_ = static_cast<const uint8_t*>(packed);
    memcpy(&file_, packed_, sizeof file_);
  }

  std::string read(Model& model) {
    if (plan_bytes_ < sizeof(PlanHeader)) return "the plan is too short";
    memcpy(&header_, plan_, sizeof header_);
    if (memcmp(header_.magic, "CAVEPLAN", 8) || header_.version != kPlanVersion) return "this is not a plan of this version";
    const PlanHeader& h = header_;
    if (!h.layers || h.layers > kMostLayers || !h.groups || h.groups > kMostGroups || h.ropes > kMostRopes ||
        h.frequencies > kMostFrequencies || !size(h.vocab) || !size(h.hidden) || !h.max_slots || h.max_slots > (1u << 20) ||
        h.kv_type >= kKvTypes) {
      return "the plan has an impossible count";
    }
    const uint64_t bytes = sizeof(PlanHeader) + uint64_t(h.groups) * sizeof(PlanGroup) + uint64_t(h.ropes) * sizeof(PlanRope) +
                           uint64_t(h.layers) * sizeof(PlanLayer) + uint64_t(h.frequencies) * sizeof(double);
    if (bytes != plan_bytes_ || bytes != h.bytes) return "the plan's length is not what its counts need";
    model.vocab = h.vocab;
    model.hidden = h.hidden;
    model.max_slots = h.max_slots;
    model.kv_type = h.kv_type;
    model.embedding_scale = h.embedding_scale;
    model.logit_scale = h.logit_scale;
    model.final_epsilon = h.final_epsilon;
    if (!finite(h.embedding_scale) || !finite(h.logit_scale) || !(h.final_epsilon >= 0 && h.final_epsilon < 1)) {
      return "the plan has a scale or an epsilon that is no sensible number";
    }
    const uint8_t* at = plan_ + sizeof(PlanHeader);
    groups(at, model);
    at += h.groups * sizeof(PlanGroup);
    const uint8_t* frequencies = plan_ + bytes - h.frequencies * sizeof(double);
    std::string wrong = ropes(at, frequencies, model);
    at += h.ropes * sizeof(PlanRope);
    for (uint32_t i = 0; i < h.layers && wrong.empty(); ++i, at += sizeof(PlanLayer)) {
      PlanLayer layer;
      memcpy(&layer, at, sizeof layer);
      wrong = read_layer(layer, model);
      if (!wrong.empty()) wrong = "layer " + std::to_string(i) + ": " + wrong;
    }
    if (wrong.empty()) wrong = matrix(h.embed, h.vocab, h.hidden, model.embed);
    if (wrong.empty()) wrong = matrix(h.head, h.vocab, h.hidden, model.head);
    if (wrong.empty()) wrong = vector(h.final_norm, h.hidden, model.final_norm);
    return wrong;
  }

 private:
  static bool size(uint64_t n) { return n && n <= kMostSize; }
  static bool finite(float x) { return std::isfinite(x); }

  void groups(const uint8_t* at, Model& model) {
    for (uint32_t i = 0; i < header_.groups; ++i) {
      PlanGroup group;
      memcpy(&group, at + i * sizeof group, sizeof group);
      model.windows.push_back(group.window);
    }
  }

  std::string ropes(const uint8_t* at, const uint8_t* frequencies, Model& model) {
    for (uint32_t i = 0; i < header_.ropes; ++i) {
      PlanRope rope;
      memcpy(&rope, at + i * sizeof rope, sizeof rope);
      const uint64_t count = rope.dim / 2;
      if (!rope.dim || rope.dim % 2 || count > header_.frequencies || rope.first > header_.frequencies - count) {
        return "a rotary embedding has impossible frequencies";
      }
      Rope found;
      found.attention_factor = rope.attention_factor;
      found.frequencies.resize(count);
      memcpy(found.frequencies.data(), frequencies + uint64_t(rope.first) * sizeof(double), count * sizeof(double));
      bool sensible = std::isfinite(rope.attention_factor);
      for (double f : found.frequencies) sensible = sensible && std::isfinite(f);
      if (!sensible) return "a rotary embedding has a frequency that is no number";
      model.ropes.push_back(std::move(found));
    }
    return "";
  }

  const char* record(int32_t index, TensorRecord& found) const {
    if (index < 0 || uint32_t(index) >= file_.tensors) return "names a tensor that the packed file has not";
    memcpy(&found, packed_ + sizeof(FileHeader) + uint64_t(index) * sizeof(TensorRecord), sizeof found);
    return nullptr;
  }

  std::string matrix(int32_t index, uint64_t rows, uint64_t columns, Matrix& out) {
    TensorRecord found;
    if (const char* wrong = record(index, found)) return wrong;
    if (found.kind == kVectorF32 || found.rows != rows || found.columns != columns) return "a matrix has another kind or shape";
    if (found.exponent < -120 || found.exponent > 120) return "a matrix has an impossible exponent";
    out.kind = found.kind;
    out.data = packed_ + found.offset;
    out.rows = rows;
    out.columns = columns;
    out.panel_bytes = panel_bytes(found.kind, columns);
    out.panels = panels(rows);
    out.scale = std::ldexp(1.0f, -found.exponent);
    return "";
  }

  std::string vector(int32_t index, uint64_t length, Vector& out) {
    TensorRecord found;
    if (const char* wrong = record(index, found)) return wrong;
    if (found.kind != kVectorF32 || found.columns != length) return "a vector has another kind or length";
    out.assign(padded(length), 0.0f);
    memcpy(out.data(), packed_ + found.offset, length * sizeof(float));
    return "";
  }

  std::string read_layer(const PlanLayer& p, Model& model) {
    if (!size(p.heads) || !size(p.kv_heads) || p.heads % p.kv_heads || p.heads / p.kv_heads > 64 || !p.head_dim ||
        p.head_dim > kMostHeadDim || uint64_t(p.heads) * p.head_dim > kMostSize) {
      return "impossible heads";
    }
    if (p.group >= header_.groups || p.activation >= kActivations || p.rope < kAbsent || p.rope >= int64_t(header_.ropes)) {
      return "a group, an activation or a rotary embedding that is not there";
    }
    if (p.rope != kAbsent && 2 * model.ropes[p.rope].frequencies.size() > p.head_dim) return "a rotary embedding wider than a head";
    if (!finite(p.scale) || !(p.mixer_epsilon >= 0 && p.mixer_epsilon < 1) || !(p.ffn_epsilon >= 0 && p.ffn_epsilon < 1)) {
      return "a scale or an epsilon that is no sensible number";
    }
    TensorRecord up;
    if (const char* wrong = record(p.up, up)) return wrong;
    if (!size(up.rows)) return "an impossible feed-forward size";
    model.layers.emplace_back();
    Layer& layer = model.layers.back();
    layer.heads = p.heads;
    layer.kv_heads = p.kv_heads;
    layer.head_dim = p.head_dim;
    layer.group = p.group;
    layer.rope = p.rope;
    layer.activation = p.activation;
    layer.scale = p.scale;
    layer.mixer_epsilon = p.mixer_epsilon;
    layer.ffn_epsilon = p.ffn_epsilon;
    layer.gated = p.gate != kAbsent;
    return tensors(p, up.rows, layer);
  }

  std::string tensors(const PlanLayer& p, uint64_t ffn, Layer& layer) {
    const uint64_t hidden = header_.hidden, wide = uint64_t(p.heads) * p.head_dim, narrow = uint64_t(p.kv_heads) * p.head_dim;
    struct Part {
      int32_t index, bias;
      uint64_t rows, columns;
      Matrix* matrix;
    };
    const Part parts[] = {
        {p.q, p.q_bias, wide, hidden, &layer.q},      {p.k, p.k_bias, narrow, hidden, &layer.k},
        {p.v, p.v_bias, narrow, hidden, &layer.v},    {p.o, p.o_bias, hidden, wide, &layer.o},
        {p.gate, p.gate_bias, ffn, hidden, &layer.gate}, {p.up, p.up_bias, ffn, hidden, &layer.up},
        {p.down, p.down_bias, hidden, ffn, &layer.down},
    };
    std::string wrong;
    for (int i = 0; i < 7 && wrong.empty(); ++i) {
      const Part& part = parts[i];
      if (part.index == kAbsent && part.matrix == &layer.gate) continue;
      wrong = matrix(part.index, part.rows, part.columns, *part.matrix);
      if (wrong.empty() && part.bias != kAbsent) {
        wrong = vector(part.bias, part.rows, layer.biases[i]);
        part.matrix->bias = layer.biases[i].data();
      }
    }
    if (wrong.empty()) wrong = vector(p.mixer_norm, hidden, layer.mixer_norm);
    if (wrong.empty()) wrong = vector(p.ffn_norm, hidden, layer.ffn_norm);
    return wrong;
  }

  const uint8_t* plan_;
  uint64_t plan_bytes_;
  const uint8_t* packed_;
  FileHeader file_;
  PlanHeader header_;
};

}  // namespace

std::string read_plan(const void* plan, uint64_t plan_bytes, const void* packed, uint64_t packed_bytes, Model& model) {
  if (packed_bytes < sizeof(FileHeader)) return "the packed file is too short";
  Model read;
  std::string wrong = Reader(plan, plan_bytes, packed).read(read);
  if (wrong.empty()) model = std::move(read);
  return wrong;
}

}  // namespace cavectl
