// One step under way: what all threads share, and what each works in alone. Internal to step.cpp, attention.cpp and engine.cpp.
#pragma once
#include "engine.h"
#include "slots.h"

namespace cavectl {

constexpr size_t kFewTokens = 4;    // so few are normed and quantised by every thread for itself, which saves a barrier
constexpr size_t kAlone = SIZE_MAX;
constexpr size_t kBlockTokens = 8;  // prompt tokens that go through a tile of keys together

// A piece of attention: some tokens of a row over some tiles, for each kv head.
struct AttentionTask {
  size_t row, first_token, tokens;
  size_t first_tile, end_tile;
  size_t parts = 1;       // pieces that share one token; its tiles are merged in order by whoever finishes last
  size_t partial = 0;     // where this token's tiles lie: numbers of a tile and kv head
  size_t whole_first = 0, whole_end = 0;  // tiles of the token over all pieces
  size_t counter = 0;
};

struct Engine::Private {
  Buffer path;                      // a tile of one head, as a draft off the first branch sees it
  Buffer f, i8, d, s, s16, i, i16;  // activations of few tokens
  Buffer loose;                     // two panels
  Buffer heads;                     // queries, running and tile softmax, scores
  float *q = nullptr, *key = nullptr, *scores = nullptr;
  Softmax total, tile;
};

using Lane = Pool::Lane;

struct Product {
  const Matrix* matrix;
  Output out;
};

// What matrices are multiplied with: normed and in integers where they ask for it. Of few tokens it is made when first asked for, by
// a worker that has a piece of the phase: before, what it is made from may not be there yet, or be gone again.
struct Inputs {
  const Kernels& kernels;
  Activations made;
  const float* from;
  size_t stride, count;
  const Vector* norm;
  float epsilon;
  bool integers;
  const std::vector<size_t>* which;
  bool pending = false;

  const Activations& get() {
    if (pending) make(0, count);
    pending = false;
    return made;
  }
  void make(size_t first, size_t end);
};

struct StepRun {
  StepRun(Engine& of, Step& what, std::vector<Sample>& into) : engine(of), step(what), samples(into) {}

  Engine& engine;
  Step& step;
  std::vector<Sample>& samples;
  std::vector<size_t> wanted;    // tokens whose logits are computed
  std::vector<size_t> sampled;   // rows that are sampled, and
  std::vector<size_t> logit_of;  // for each of them, which of `wanted`
  std::vector<std::vector<AttentionTask>> tasks;  // of each group
  std::vector<size_t> row_of, position_of, slot_of;  // of each token: logical position, and which of the row's slots it is kept in
  std::vector<uint8_t> straight;                     // of each token: whether all it sees is kept where its position says
  std::vector<size_t> parent_of;                     // of each token: the draft before it, kAlone: none
  std::unique_ptr<std::atomic<size_t>[]> finished;  // pieces of a token and kv head that are done, over all layers
  size_t counters = 0;
  bool all_single = true, all_straight = true;
  size_t most_kv_heads = 0, most_group = 0, most_width = 0, most_rope = 0;

  size_t tokens() const { return step.tokens.size(); }
  void plan();
  bool need_memory();
  void need_top();  // room for log-probabilities, so that no thread but the caller's ever allocates
  size_t phases() const;
  void work(Lane& lane);

 private:
  void plan_group(size_t group);
  void embed(Lane& lane);
  void attention(Lane& lane, size_t layer);
  void write_keys(const Layer& layer, const KvPlane& plane, size_t token, float* scratch);
  void attend_task(const Layer& layer, const KvPlane& plane, const AttentionTask& task, size_t head, Engine::Private& own);
  void attend_tiles(const Layer& layer, const KvPlane& plane, const AttentionTask& task, size_t head, Engine::Private& own);
  void finish_parts(const Layer& layer, const AttentionTask& task, size_t head, Engine::Private& own);
  void load_queries(const Layer& layer, size_t token, size_t head, float* q);
  void store_mixed(const Layer& layer, size_t token, size_t head, const Softmax& total);
  void turn(const Layer& layer, size_t token, float* x) const;
  void place_tokens(size_t row);
  Tile path_tile(const KvPlane& plane, size_t token, size_t head, size_t start, const Tile& seen, KvPlane& into, Engine::Private& own) const;
  SlotPlace place_of(const int32_t* pages, size_t slot) const { return {size_t(pages[slot / kPageTokens]), slot % kPageTokens}; }
  void draw(size_t n, SampleScratch& scratch);
  void keep(const StepRow& row, size_t length, size_t node);
  Softmax partial_of(const AttentionTask& task, size_t tile, size_t head) const;
  Inputs inputs(Lane& lane, const float* x, size_t stride, size_t columns, const Vector* norm, float epsilon, bool integers,
                const std::vector<size_t>* which = nullptr);
  void products(Lane& lane, const Product* products, size_t count, Inputs x);
  void feed(Lane& lane, const Layer& layer, Inputs x);
  void sample_rows(Lane& lane);
  size_t piece(size_t total) const;

  static size_t first_visible(size_t position, size_t window) { return window && position + 1 > window ? position + 1 - window : 0; }
};

}  // namespace cavectl
