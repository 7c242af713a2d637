// Attention of a step: which pieces there are, and how each is computed.
//
// Positions are taken in tiles of 64, each tile's softmax by itself, tiles merged in order. Which thread takes a piece, and into how
// many pieces a long context is cut, never changes a sum.
#include <algorithm>
#include <cstring>

#include "step_run.h"

namespace cavectl {

namespace {

constexpr size_t kLeastPartTiles = 4;  // a piece of a long context is at least so long

}  // namespace

void StepRun::plan() {
  const Model& model = engine.model_;
  for (const Layer& layer : model.layers) {
    most_kv_heads = std::max(most_kv_heads, layer.kv_heads);
    most_group = std::max(most_group, layer.heads / layer.kv_heads);
    most_width = std::max(most_width, padded(layer.head_dim));
  }
  for (const Rope& rope : model.ropes) most_rope = std::max(most_rope, rope.frequencies.size());
  for (size_t r = 0; r < step.rows.size(); ++r) {
    const StepRow& row = step.rows[r];
    all_single = all_single && row.count == 1;
    place_tokens(r);
    if (row.slot >= 0) {
      const size_t last = row.start + row.plain() - 1;
      sampled.push_back(r);
      logit_of.push_back(engine.keep_logits ? last : wanted.size());
      for (size_t t = last; !engine.keep_logits && t < row.start + row.count; ++t) wanted.push_back(t);
    }
  }
  if (engine.keep_logits) {
    for (size_t t = 0; t < tokens(); ++t) wanted.push_back(t);
  }
  tasks.resize(engine.caches_.size());
  for (size_t group = 0; group < tasks.size(); ++group) plan_group(group);
  finished = std::make_unique<std::atomic<size_t>[]>(counters * most_kv_heads);
}

// Tokens are kept in the order of the row. A draft's position is one behind its parent's.
void StepRun::place_tokens(size_t r) {
  const StepRow& row = step.rows[r];
  for (size_t i = 0; i < row.count; ++i) {
    size_t position = row.position + i, parent = kAlone;
    bool in_order = true;
    if (i >= row.plain()) {
      const int32_t node = row.parents[i - row.plain()];
      if (node >= 0) parent = row.start + row.plain() + size_t(node);
      position = parent == kAlone ? row.position + row.plain() : position_of[parent] + 1;
      in_order = position == row.position + i && (parent == kAlone || straight[parent]);
    }
    row_of.push_back(r);
    position_of.push_back(position);
    slot_of.push_back(row.position + i);
    straight.push_back(in_order);
    parent_of.push_back(parent);
    all_straight = all_straight && in_order;
  }
}

void StepRun::plan_group(size_t group) {
  const size_t window = engine.model_.windows[group], threads = size_t(engine.pool_.threads());
  const size_t pieces_wanted = 4 * threads;
  size_t partial = 0;
  for (size_t r = 0; r < step.rows.size(); ++r) {
    const StepRow& row = step.rows[r];
    for (size_t i = 0; i < row.count; i += kBlockTokens) {
      AttentionTask task{r, row.start + i, std::min(kBlockTokens, row.count - i), 0, 0};
      const auto first = position_of.begin() + ptrdiff_t(task.first_token), end = first + ptrdiff_t(task.tokens);
      task.first_tile = task.whole_first = first_visible(*std::min_element(first, end), window) / kTileTokens;
      task.end_tile = task.whole_end = *std::max_element(first, end) / kTileTokens + 1;
      const size_t tiles = task.end_tile - task.first_tile;
      if (row.count == 1 && threads > 1 && step.rows.size() * most_kv_heads < pieces_wanted) {
        task.parts = std::min(tiles / kLeastPartTiles, pieces_wanted);
        task.parts = std::max<size_t>(task.parts, 1);
      }
      if (task.parts == 1) {
        tasks[group].push_back(task);
        continue;
      }
      task.partial = partial;
      task.counter = counters++;
      partial += tiles;
      for (size_t part = 0; part < task.parts; ++part) {
        task.first_tile = task.whole_first + tiles * part / task.parts;
        task.end_tile = task.whole_first + tiles * (part + 1) / task.parts;
        tasks[group].push_back(task);
      }
    }
  }
}

Softmax StepRun::partial_of(const AttentionTask& task, size_t tile, size_t head) const {
  const size_t size = most_group * (most_width + 2);
  float* at = engine.work_.partial.as<float>() + ((task.partial + tile - task.whole_first) * most_kv_heads + head) * size;
  return {at, at + most_group, at + 2 * most_group};
}

void StepRun::turn(const Layer& layer, size_t token, float* x) const {
  if (layer.rope == kAbsent) return;
  const size_t half = engine.model_.ropes[size_t(layer.rope)].frequencies.size();
  const float* table = engine.work_.rope.as<float>() + (size_t(layer.rope) * tokens() + token) * 2 * most_rope;
  engine.kernels_.rotate(x, table, table + most_rope, half);
}

void StepRun::write_keys(const Layer& layer, const KvPlane& plane, size_t token, float* scratch) {
  const Workspace& w = engine.work_;
  const size_t d = layer.head_dim, stride = padded(layer.kv_heads * d);
  const SlotPlace place = place_of(step.rows[row_of[token]].pages[layer.group], slot_of[token]);
  for (size_t head = 0; head < layer.kv_heads; ++head) {
    memcpy(scratch, w.k.as<float>() + token * stride + head * d, d * sizeof(float));
    turn(layer, token, scratch);
    engine.kernels_.write_kv(plane, head, place.page, place.slot, scratch, w.v.as<float>() + token * stride + head * d);
  }
}

void StepRun::load_queries(const Layer& layer, size_t token, size_t head, float* q) {
  const size_t d = layer.head_dim, width = padded(d), group = layer.heads / layer.kv_heads;
  const float* from = engine.work_.q.as<float>() + token * padded(layer.heads * d) + head * group * d;
  for (size_t g = 0; g < group; ++g, from += d, q += width) {
    memcpy(q, from, d * sizeof(float));
    turn(layer, token, q);
    for (size_t i = 0; i < d; ++i) q[i] *= layer.scale;
    for (size_t i = d; i < width; ++i) q[i] = 0;
  }
}

void StepRun::store_mixed(const Layer& layer, size_t token, size_t head, const Softmax& total) {
  const size_t d = layer.head_dim, width = padded(d), group = layer.heads / layer.kv_heads;
  float* out = engine.work_.mixed.as<float>() + token * padded(layer.heads * d) + head * group * d;
  for (size_t g = 0; g < group; ++g) {
    for (size_t i = 0; i < d; ++i) out[g * d + i] = total.values[g * width + i] / total.sum[g];
  }
}

namespace {

void clear(const Softmax& total, size_t group, size_t width) {
  for (size_t g = 0; g < group; ++g) {
    total.best[g] = -__builtin_inff();
    total.sum[g] = 0;
  }
  memset(total.values, 0, group * width * sizeof(float));
}

}  // namespace

// The tile from position `start` on as `token` sees it: in `into`, pages of one head, with its path in the order of positions.
Tile StepRun::path_tile(const KvPlane& plane, size_t token, size_t head, size_t start, const Tile& seen, KvPlane& into,
                        Engine::Private& own) const {
  static constexpr int32_t kInOrder[kTilePages] = {0, 1, 2, 3};
  static_assert(kTilePages == 4, "a tile's pages are counted here");
  into = plane;
  into.kv_heads = 1;
  into.pages = kTilePages;
  into.k = own.path.as<uint8_t>();
  into.v = into.k + kTilePages * key_head_bytes(into);
  into.k_scale = into.v + kTilePages * value_head_bytes(into);
  into.v_scale = into.k_scale + kTilePages * kPageTokens * sizeof(uint16_t);
  for (int page = seen.low / kPageTokens; page * kPageTokens < seen.high; ++page) {
    copy_head(plane, head, size_t(seen.pages[page]), into, 0, size_t(page));
  }
  const int32_t* pages = seen.pages - start / kPageTokens;
  for (size_t t = token; t != kAlone && position_of[t] >= start + size_t(seen.low); t = parent_of[t]) {
    const size_t position = position_of[t];
    if (position >= start + size_t(seen.high) || slot_of[t] == position) continue;
    const size_t at = position - start;
    copy_slot(plane, head, place_of(pages, slot_of[t]), into, 0, {at / kPageTokens, at % kPageTokens});
  }
  return {kInOrder, seen.low, seen.high, nullptr};
}

void StepRun::attend_tiles(const Layer& layer, const KvPlane& plane, const AttentionTask& task, size_t head, Engine::Private& own) {
  const size_t group = layer.heads / layer.kv_heads, width = padded(layer.head_dim), window = engine.model_.windows[layer.group];
  const StepRow& row = step.rows[task.row];
  const int32_t* pages = row.pages[layer.group];
  for (size_t i = 0; i < task.tokens; ++i) load_queries(layer, task.first_token + i, head, own.q + i * group * width);
  if (task.parts == 1) clear({own.total.best, own.total.sum, own.total.values}, task.tokens * group, width);
  for (size_t tile = task.first_tile; tile < task.end_tile; ++tile) {
    const size_t start = tile * kTileTokens;
    for (size_t i = 0; i < task.tokens; ++i) {
      const size_t position = position_of[task.first_token + i], first = first_visible(position, window);
      if (position < start || first >= start + kTileTokens) continue;
      const Tile seen{pages + tile * kTilePages, int(std::max(first, start) - start), int(std::min<size_t>(position + 1 - start, kTileTokens)),
                      i == 0 && tile + 1 < task.end_tile ? pages + (tile + 1) * kTilePages : nullptr};
      const float* q = own.q + i * group * width;
      if (!straight[task.first_token + i] && position >= row.position + row.plain() && start + kTileTokens > row.position + row.plain()) {
        KvPlane path;
        const Tile along = path_tile(plane, task.first_token + i, head, start, seen, path, own);
        engine.kernels_.attend(path, 0, along, q, group, own.scores, own.tile);
        engine.kernels_.merge({own.total.best + i * group, own.total.sum + i * group, own.total.values + i * group * width}, own.tile, group,
                              layer.head_dim);
        continue;
      }
      if (task.parts > 1) {
        engine.kernels_.attend(plane, head, seen, q, group, own.scores, partial_of(task, tile, head));
        continue;
      }
      engine.kernels_.attend(plane, head, seen, q, group, own.scores, own.tile);
      engine.kernels_.merge({own.total.best + i * group, own.total.sum + i * group, own.total.values + i * group * width}, own.tile, group,
                            layer.head_dim);
    }
  }
}

void StepRun::finish_parts(const Layer& layer, const AttentionTask& task, size_t head, Engine::Private& own) {
  const size_t done = finished[task.counter * most_kv_heads + head].fetch_add(1, std::memory_order_acq_rel) + 1;
  if (done % task.parts) return;  // a layer may have fewer heads than the one before, so it counts its own alone
  const size_t group = layer.heads / layer.kv_heads;
  clear(own.total, group, padded(layer.head_dim));
  for (size_t tile = task.whole_first; tile < task.whole_end; ++tile) {
    engine.kernels_.merge(own.total, partial_of(task, tile, head), group, layer.head_dim);
  }
  store_mixed(layer, task.first_token, head, own.total);
}

void StepRun::attend_task(const Layer& layer, const KvPlane& plane, const AttentionTask& task, size_t head, Engine::Private& own) {
  const size_t group = layer.heads / layer.kv_heads, width = padded(layer.head_dim);
  if (all_single && task.end_tile == task.whole_end) {  // only this piece reads the new position, so it may write it
    const size_t token = task.first_token, d = layer.head_dim, stride = padded(layer.kv_heads * d), position = position_of[token];
    const size_t page = size_t(step.rows[task.row].pages[layer.group][position / kPageTokens]);
    memcpy(own.key, engine.work_.k.as<float>() + token * stride + head * d, d * sizeof(float));
    turn(layer, token, own.key);
    const float* value = engine.work_.v.as<float>() + token * stride + head * d;
    engine.kernels_.write_kv(plane, head, page, position % kPageTokens, own.key, value);
  }
  attend_tiles(layer, plane, task, head, own);
  if (task.parts > 1) {
    finish_parts(layer, task, head, own);
    return;
  }
  for (size_t i = 0; i < task.tokens; ++i) {
    store_mixed(layer, task.first_token + i, head,
                {own.total.best + i * group, own.total.sum + i * group, own.total.values + i * group * width});
  }
}

void StepRun::attention(Lane& lane, size_t index) {
  const Layer& layer = engine.model_.layers[index];
  GroupCache& cache = engine.caches_[layer.group];
  const KvPlane& plane = cache.planes[engine.plane_of_layer_[index]];
  Engine::Private& own = *engine.private_[size_t(lane.worker)];
  if (!all_single) {
    engine.pool_.share(lane, tokens(), piece(tokens()), [&](size_t first, size_t end) {
      for (size_t t = first; t < end; ++t) write_keys(layer, plane, t, own.key);
    });
  }
  const std::vector<AttentionTask>& found = tasks[layer.group];
  const size_t total = found.size() * layer.kv_heads;
  const size_t size = std::max<size_t>(1, std::min<size_t>(8, total / (8 * size_t(engine.pool_.threads()))));
  engine.pool_.share(lane, total, size, [&](size_t first, size_t end) {
    for (size_t n = end; n > first; --n) {
      attend_task(layer, plane, found[(n - 1) / layer.kv_heads], (n - 1) % layer.kv_heads, own);
    }
  });
}

}  // namespace cavectl
