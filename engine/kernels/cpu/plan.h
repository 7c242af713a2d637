// The plan: what a model computes, as flat little-endian records that engine/runtime/native_plan.py writes from a ModelSpec.
//
// Owned here: the records, and the check that makes every number of them safe to use. Invariant: a Model exists only when the plan and
// the packed file have passed that check: tensors have the kinds and shapes that the layers multiply by, and lie inside the file.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace cavectl {

constexpr uint32_t kPlanVersion = 1;
constexpr int32_t kAbsent = -1;

// After the header: PlanGroup[groups], PlanRope[ropes], PlanLayer[layers], double[frequencies]. Tensors are numbers in the packed file.
struct PlanHeader {
  char magic[8];  // "CAVEPLAN"
  uint32_t version, bytes;
  uint32_t vocab, hidden, layers, groups, ropes, frequencies;
  uint32_t kv_type, max_slots;
  int32_t embed, head, final_norm;
  float embedding_scale, logit_scale, final_epsilon;
};
static_assert(sizeof(PlanHeader) == 72);

struct PlanGroup {
  uint32_t window;  // 0: none; else a query sees itself and the window - 1 tokens before it
  uint32_t reserved;
};
static_assert(sizeof(PlanGroup) == 8);

struct PlanRope {
  double attention_factor;
  uint32_t dim, first;  // dim / 2 frequencies (radians per position) from `first` on
};
static_assert(sizeof(PlanRope) == 16);

struct PlanLayer {
  int32_t q, k, v, o, gate, up, down;  // gate may be absent
  int32_t q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  int32_t mixer_norm, ffn_norm;
  uint32_t heads, kv_heads, head_dim, group;
  int32_t rope;  // or absent
  uint32_t activation;
  float scale, mixer_epsilon, ffn_epsilon;
  uint32_t reserved;
};
static_assert(sizeof(PlanLayer) == 104);

// Floats of a vector, copied to padded length; matrices view the packed file.
using Vector = std::vector<float>;

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  bool gated = false;
  Vector mixer_norm, ffn_norm;
  size_t heads = 0, kv_heads = 0, head_dim = 0, group = 0;
  int32_t rope = kAbsent;
  uint32_t activation = 0;
  float scale = 0, mixer_epsilon = 0, ffn_epsilon = 0;
  Vector biases[7];
};

struct Rope {
  std::vector<double> frequencies;
  double attention_factor = 1;
};

struct Model {
  size_t vocab = 0, hidden = 0, max_slots = 0;
  uint32_t kv_type = 0;
  std::vector<size_t> windows;  // of each group
  std::vector<Rope> ropes;
  std::vector<Layer> layers;
  Matrix embed, head;
  Vector final_norm;
  float embedding_scale = 1, logit_scale = 1, final_epsilon = 0;
};

// Null and a filled `model`, or why it is refused. `packed` has passed validate_packed (packed_check.h).
std::string read_plan(const void* plan, uint64_t plan_bytes, const void* packed, uint64_t packed_bytes, Model& model);

}  // namespace cavectl
