// A step from token ids to sampled ids: every thread runs StepRun::work and takes its share of each phase.
//
//   embed | [norm, int8] q k v | attention | [int8] o, added | [norm, int8] gate up | [int8] down, added | ... | norm, head | sample
//
// Each bar ends a phase. What stands in brackets every thread does for itself when there are few tokens, once it has a piece of the
// phase that needs it; else all share it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step_run.h"

namespace cavectl {

size_t StepRun::piece(size_t total) const {
  const size_t size = total / (8 * size_t(engine.pool_.threads()));
  return size < 1 ? 1 : size > 32 ? 32 : size;
}

size_t StepRun::phases() const { return 16 + 10 * engine.model_.layers.size(); }

bool StepRun::need_memory() {
  const Model& model = engine.model_;
  Workspace& w = engine.work_;
  size_t hidden = padded(model.hidden), wide = 0, narrow = 0, ffn = 0;
  for (const Layer& layer : model.layers) {
    wide = std::max(wide, padded(layer.heads * layer.head_dim));
    narrow = std::max(narrow, padded(layer.kv_heads * layer.head_dim));
    ffn = std::max(ffn, padded(layer.up.rows));
  }
  const size_t t = std::max<size_t>(tokens(), 1), columns = std::max(hidden, std::max(wide, ffn)), blocks = columns / kBlockColumns + 1;
  const auto floats = [](Buffer& buffer, size_t count) { return buffer.need(count * sizeof(float)); };
  bool had = floats(w.x, t * hidden) && floats(w.q, t * wide) && floats(w.k, t * narrow) && floats(w.v, t * narrow) &&
             floats(w.mixed, t * wide) && floats(w.h, t * ffn) && floats(w.logits, wanted.size() * padded(model.vocab)) &&
             floats(w.rope, t * model.ropes.size() * 2 * most_rope) && floats(w.f, t * columns) && w.i8.need(t * blocks * kBlockColumns) &&
             floats(w.d, t * blocks) && floats(w.s, t * blocks) && floats(w.s16, 2 * t * blocks) && floats(w.i, t * blocks) &&
             floats(w.i16, 2 * t * blocks);
  size_t partials = 0;
  for (const auto& group : tasks) {
    size_t tiles = 0;
    for (const AttentionTask& task : group) tiles += task.parts > 1 ? task.end_tile - task.first_tile : 0;
    partials = std::max(partials, tiles);
  }
  had = had && floats(w.partial, partials * most_kv_heads * most_group * (most_width + 2));
  for (auto& own : engine.private_) {
    const size_t heads = kBlockTokens * most_group, few = kFewTokens;
    had = had && floats(own->f, few * columns) && own->i8.need(few * blocks * kBlockColumns) && floats(own->d, few * blocks) &&
          floats(own->s, few * blocks) && floats(own->s16, 2 * few * blocks) && floats(own->i, few * blocks) &&
          floats(own->i16, 2 * few * blocks) && own->loose.need(2 * loose_room(columns)) &&
          floats(own->heads, (2 * heads + most_group + 1) * most_width + most_group * kTileTokens + 2 * (heads + most_group));
    const size_t slot_bytes = 2 * (padded(most_width) * sizeof(float) + sizeof(uint16_t));
    had = had && (all_straight || own->path.need(kTileTokens * slot_bytes));
    if (!had) return false;
    float* at = own->heads.as<float>();
    own->q = at;
    own->total.values = at + heads * most_width;
    own->tile.values = own->total.values + heads * most_width;
    own->key = own->tile.values + most_group * most_width;
    own->scores = own->key + most_width;
    own->total.best = own->scores + most_group * kTileTokens;
    own->total.sum = own->total.best + heads;
    own->tile.best = own->total.sum + heads;
    own->tile.sum = own->tile.best + most_group;
  }
  return had;
}

void StepRun::need_top() {
  for (size_t r : sampled) {
    const StepRow& row = step.rows[r];
    const int32_t index = step.rows[r].slot;
    const Slot* slot = &engine.slots_[size_t(index)];
    for (const OpenedSlot& opened : step.opened) slot = opened.index == index ? &opened.slot : slot;
    for (size_t i = 0; slot->params.logprobs > 0 && i < row.most_draws(); ++i) {
      samples[row.first_draw + i].top.reserve(std::min(size_t(slot->params.logprobs), engine.model_.vocab));
    }
  }
}

void StepRun::embed(Lane& lane) {
  const Model& model = engine.model_;
  const Workspace& w = engine.work_;
  engine.pool_.share(lane, tokens(), piece(tokens()), [&](size_t first, size_t end) {
    for (size_t t = first; t < end; ++t) {
      float* x = w.x.as<float>() + t * padded(model.hidden);
      engine.kernels_.unpack_row(model.embed, size_t(step.tokens[t]), model.embedding_scale, x);
      for (size_t i = model.hidden; i < padded(model.hidden); ++i) x[i] = 0;
      for (size_t r = 0; r < model.ropes.size(); ++r) {
        const Rope& rope = model.ropes[r];
        float* table = w.rope.as<float>() + (r * tokens() + t) * 2 * most_rope;
        for (size_t i = 0; i < rope.frequencies.size(); ++i) {
          const double angle = double(position_of[t]) * rope.frequencies[i];
          table[i] = float(std::cos(angle) * rope.attention_factor);
          table[most_rope + i] = float(std::sin(angle) * rope.attention_factor);
        }
      }
    }
  });
}

Inputs StepRun::inputs(Lane& lane, const float* x, size_t stride, size_t columns, const Vector* norm, float epsilon, bool integers,
                       const std::vector<size_t>* which) {
  const size_t count = which ? which->size() : tokens();
  const bool few = count <= kFewTokens, copied = norm || which;
  Engine::Private& own = *engine.private_[size_t(lane.worker)];
  const Workspace& w = engine.work_;
  Inputs in{engine.kernels_, {}, x, stride, count, norm, epsilon, integers, which};
  Activations& a = in.made;
  a.columns = columns;
  a.blocks = columns / kBlockColumns;
  a.stride = copied ? padded(columns) : stride;
  a.f = copied ? (few ? own.f : w.f).as<float>() : const_cast<float*>(x);
  a.q = (few ? own.i8 : w.i8).as<int8_t>();
  a.d = (few ? own.d : w.d).as<float>();
  a.s = (few ? own.s : w.s).as<float>();
  a.s16 = (few ? own.s16 : w.s16).as<float>();
  a.i = (few ? own.i : w.i).as<int32_t>();
  a.i16 = (few ? own.i16 : w.i16).as<int32_t>();
  a.loose = own.loose.as<uint8_t>();
  in.pending = few && (norm || integers);
  if (!few && (norm || integers)) {
    engine.pool_.share(lane, count, piece(count), [&](size_t first, size_t end) { in.make(first, end); });
  }
  return in;
}

void Inputs::make(size_t first, size_t end) {
  for (size_t t = first; t < end; ++t) {
    const float* at = from + (which ? (*which)[t] : t) * stride;
    if (norm) kernels.rms_norm(at, norm->data(), made.columns, epsilon, made.f + t * made.stride);
    if (integers) kernels.quantise(made, t);
  }
}

void StepRun::products(Lane& lane, const Product* products, size_t count, Inputs x) {
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += products[i].matrix->panels;
  engine.pool_.share(lane, total, piece(total), [&](size_t first, size_t end) {
    const Activations& activations = x.get();
    size_t start = 0;
    for (size_t i = 0; i < count; start += products[i++].matrix->panels) {
      const size_t from = std::max(first, start), to = std::min(end, start + products[i].matrix->panels);
      if (from < to) engine.kernels_.matmul(*products[i].matrix, activations, x.count, from - start, to - from, products[i].out);
    }
  });
}

void StepRun::feed(Lane& lane, const Layer& layer, Inputs x) {
  const Output out{engine.work_.h.as<float>(), padded(layer.up.rows), false};
  engine.pool_.share(lane, layer.up.panels, piece(layer.up.panels), [&](size_t first, size_t end) {
    const Matrix* gate = layer.gated ? &layer.gate : nullptr;
    engine.kernels_.feed(gate, layer.up, layer.activation, x.get(), x.count, first, end - first, out);
  });
}

void StepRun::work(Lane& lane) {
  const Model& model = engine.model_;
  const Workspace& w = engine.work_;
  const size_t stride = padded(model.hidden);
  float* x = w.x.as<float>();
  embed(lane);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Layer& layer = model.layers[i];
    const size_t wide = padded(layer.heads * layer.head_dim), narrow = padded(layer.kv_heads * layer.head_dim);
    const bool integers = is_integer(layer.q.kind) || is_integer(layer.k.kind) || is_integer(layer.v.kind);
    const Inputs mixer_in = inputs(lane, x, stride, model.hidden, &layer.mixer_norm, layer.mixer_epsilon, integers);
    const Product qkv[] = {{&layer.q, {w.q.as<float>(), wide, false}},
                           {&layer.k, {w.k.as<float>(), narrow, false}},
                           {&layer.v, {w.v.as<float>(), narrow, false}}};
    products(lane, qkv, 3, mixer_in);
    attention(lane, i);
    const Inputs mixed = inputs(lane, w.mixed.as<float>(), wide, layer.heads * layer.head_dim, nullptr, 0, is_integer(layer.o.kind));
    const Product o{&layer.o, {x, stride, true}};
    products(lane, &o, 1, mixed);
    const bool fed_integers = is_integer(layer.up.kind) || (layer.gated && is_integer(layer.gate.kind));
    feed(lane, layer, inputs(lane, x, stride, model.hidden, &layer.ffn_norm, layer.ffn_epsilon, fed_integers));
    const Inputs fed = inputs(lane, w.h.as<float>(), padded(layer.up.rows), layer.up.rows, nullptr, 0, is_integer(layer.down.kind));
    const Product down{&layer.down, {x, stride, true}};
    products(lane, &down, 1, fed);
  }
  if (wanted.empty()) return;
  const bool integers = is_integer(model.head.kind);
  const Inputs in = inputs(lane, x, stride, model.hidden, &model.final_norm, model.final_epsilon, integers, &wanted);
  const Product head{&model.head, {w.logits.as<float>(), padded(model.vocab), false}};
  products(lane, &head, 1, in);
  sample_rows(lane);
}

void StepRun::sample_rows(Lane& lane) {
  const Model& model = engine.model_;
  const size_t width = padded(model.vocab);
  if (model.logit_scale != 1.0f) {
    engine.pool_.share(lane, wanted.size(), 1, [&](size_t first, size_t end) {
      for (size_t n = first; n < end; ++n) {
        float* at = engine.work_.logits.as<float>() + n * width;
        for (size_t i = 0; i < model.vocab; ++i) at[i] *= model.logit_scale;
      }
    });
  }
  engine.pool_.share(lane, sampled.size(), 1, [&](size_t first, size_t end) {
    for (size_t n = first; n < end; ++n) draw(n, engine.scratch_[size_t(lane.worker)]);
  });
}

// Draws after the last plain token, and on along the tree as long as what is drawn was drafted there.
void StepRun::draw(size_t n, SampleScratch& scratch) {
  StepRow& row = step.rows[sampled[n]];
  Slot& slot = engine.slots_[size_t(row.slot)];
  const size_t vocab = engine.model_.vocab, width = padded(vocab);
  const int32_t* drafts = step.tokens.data() + row.start + row.plain();
  const size_t before = slot.tokens.size();
  size_t length = 0;
  int32_t node = -1;
  for (;;) {
    const float* logits = engine.work_.logits.as<float>() + (logit_of[n] + size_t(node + 1)) * width;
    Sample& found = samples[row.first_draw + row.draws];
    sample(logits, int32_t(vocab), slot, row.mask, scratch, found);
    if (found.status != kSampled && row.draws) break;  // the next step will say what is wrong, as it would have without drafts
    ++row.draws;
    if (found.status != kSampled) break;
    int32_t child = node + 1;
    while (child < int32_t(row.parents.size()) && !(row.parents[size_t(child)] == node && drafts[child] == found.token)) ++child;
    if (child == int32_t(row.parents.size())) break;
    slot.append(found.token);
    node = child;
    keep(row, length++, size_t(node));
  }
  while (slot.tokens.size() > before) slot.take_back();  // the whole step has to succeed first
}

// Draft `node` was right and is the row's `length`th: its keys and values move to where its position says.
void StepRun::keep(const StepRow& row, size_t length, size_t node) {
  const size_t behind = row.position + row.plain();
  if (length == node) return;
  for (size_t i = 0; i < engine.model_.layers.size(); ++i) {
    const Layer& layer = engine.model_.layers[i];
    const KvPlane& plane = engine.caches_[layer.group].planes[engine.plane_of_layer_[i]];
    const int32_t* pages = row.pages[layer.group];
    for (size_t head = 0; head < layer.kv_heads; ++head) {
      copy_slot(plane, head, place_of(pages, behind + node), plane, head, place_of(pages, behind + length));
    }
  }
}

}  // namespace cavectl
