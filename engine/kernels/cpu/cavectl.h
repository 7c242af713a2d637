// The C ABI of the CPU backend: what engine/kernels/cpu/lib.py calls through ctypes. Plain integers, floats and buffers only.
//
// Every function that can fail returns 0 or a negative code and leaves a line for a person in the `error` buffer
// (CAVECTL_ERROR_BYTES, NUL-terminated). No function throws, none prints. Calls on one engine come from one thread at a time.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)  // the rest of the library is hidden
#ifdef __cplusplus
extern "C" {
#endif

#define CAVECTL_ABI 2
#define CAVECTL_ERROR_BYTES 512
#define CAVECTL_INVALID (-1)  // the caller's input breaks a rule; nothing was changed
#define CAVECTL_MEMORY (-2)   // the system gave no memory; all is as it was
#define CAVECTL_INTERNAL (-3)

int32_t cavectl_abi(void);

// The instruction sets this build has and this machine runs, best first, separated by commas: "avx512,avx2,scalar".
const char* cavectl_isas(void);

// --- packing (pack.cpp) ---------------------------------------------------------------------------------------------------------

// One tensor of a checkpoint into its packed form. `type` is the GGUF type's name ("Q4_1", "F16", "BF16", "F32", ...).
// source: [rows][bytes of a row]; interleaved_heads: 0, or the number of heads whose rows GGUF stores with halves interleaved, to be
// put back (engine/weights/gguf_source.py). kind: one of formats.h. target: tensor_bytes(kind, rows, columns) bytes.
// A vector (kind 0) has rows = 1; interleaved_heads is then of its elements.
// exponent: receives the tensor's exponent (0 unless the source's scales do not fit float16 as they are).
int32_t cavectl_pack(const char* type, const void* source, uint64_t source_bytes, uint64_t rows, uint64_t columns,
                     uint64_t interleaved_heads, uint32_t kind, void* target, uint64_t target_bytes, int32_t* exponent,
                     char* error);

// Rows first .. first + count - 1 of a packed tensor as float32 [count][columns]. What the kernels take the weights for.
int32_t cavectl_unpack(uint32_t kind, int32_t exponent, const void* packed, uint64_t bytes, uint64_t rows, uint64_t columns,
                       uint64_t first, uint64_t count, float* target, char* error);

// Whether the bytes are a packed file that may be used (packed_check.h): 0, or a line that says what is wrong.
int32_t cavectl_check_packed(const void* data, uint64_t bytes, char* error);

// --- the sampler alone, for tests (sampler_abi.cpp) --------------------------------------------------------------------------------

// words: int64 [..] and numbers: float64 [..] describe one slot as open_slot does in a step (see below). logits: float32 [vocab].
// result: int32 status, token; top_count pairs go to top_ids / top_logprobs (room for max_top).
int32_t cavectl_sample(const float* logits, int32_t vocab, const int64_t* words, int64_t word_count, const double* numbers,
                       int64_t number_count, const uint8_t* mask, int32_t* status, int32_t* token, double* logprob,
                       int32_t max_top, int32_t* top_count, int32_t* top_ids, double* top_logprobs, char* error);

// A slot as words and numbers, here and in a step:
//   words:   slot, choice, seed (bits of the unsigned), top_k, repeat_last_n, min_tokens, logprobs (-1: none),
//            n_bias, n_stop, n_prompt, n_output, then bias ids, stop ids, prompt ids, output ids
//   numbers: temperature, top_p, min_p, repetition, presence, frequency, then n_bias bias values

// --- an engine ---------------------------------------------------------------------------------------------------------------------

typedef struct cavectl_engine cavectl_engine;

// packed: the mapped packed file, alive as long as the engine. plan: see plan.h. isa: a name of cavectl_isas, or "" for the best.
// pages: of each cache group. Both buffers pass the validator before anything of them is used.
cavectl_engine* cavectl_open(const void* packed, uint64_t packed_bytes, const void* plan, uint64_t plan_bytes, const int64_t* pages,
                             int32_t groups, int32_t threads, const char* isa, char* error);

void cavectl_close(cavectl_engine* engine);

// More pages of each group; those below the old counts keep what they hold where `held` lists them (held_counts per group).
int32_t cavectl_grow(cavectl_engine* engine, const int64_t* pages, const int64_t* held, const int64_t* held_counts, int32_t groups,
                     char* error);

// One step. words (int64) describe it:
//   n_closed, closed slots ..., n_opened, for each: its words (numbers come one after another in `numbers`),
//   n_copies, (group, source, target) ...,
//   n_rows, for each: position, n_tokens, sampling slot or -1, mask offset in `masks` or -1, n_drafts,
//     tokens ... (a row's only token may be -1: the last one of its slot), of its last n_drafts the parents (a draft's number or -1),
//     then for each group: n_pages, pages ...
// A row with drafts is drawn from after its last plain token, and on as long as what was drawn is a draft there; the keys and values
// of drafts that were right then lie at their positions.
// Results: drawn[row] draws of each row, and of all draws one after another: status (sampler.h), token, logprob (NaN when the slot asks
// for none), and top_count pairs at draw * max_top of top_ids / top_logprobs.
int32_t cavectl_step(cavectl_engine* engine, const int64_t* words, int64_t word_count, const double* numbers, int64_t number_count,
                     const uint8_t* masks, int64_t mask_bytes, int32_t max_rows, int32_t* drawn, int32_t max_draws, int32_t* status,
                     int32_t* token, double* logprob, int32_t max_top, int32_t* top_count, int32_t* top_ids, double* top_logprobs, char* error);

// For tests and evaluation: from now on each step leaves the logits of all its tokens (not only of sampled ones); copy [tokens][vocab]
// of the last step. 0 rows when not asked for.
int32_t cavectl_keep_logits(cavectl_engine* engine, int32_t on);
int64_t cavectl_logits(cavectl_engine* engine, float* target, int64_t rows);

// Bytes of memory that the engine itself holds (cache and workspace), without the packed file.
int64_t cavectl_resident_bytes(cavectl_engine* engine);

// --- drafts from the text itself (lookup.h) --------------------------------------------------------------------------------------------

typedef struct cavectl_lookup cavectl_lookup;

// An empty text; null when the system gives no memory.
cavectl_lookup* cavectl_lookup_open(void);
void cavectl_lookup_close(cavectl_lookup* text);
int64_t cavectl_lookup_size(const cavectl_lookup* text);

// Appends tokens, then drafts what may follow: nodes [most_nodes][3] receives token, parent and match of each. Returns how many nodes
// there are, or CAVECTL_MEMORY.
int64_t cavectl_lookup_propose(cavectl_lookup* text, const int32_t* tokens, uint64_t count, uint64_t most_nodes, uint64_t most_depth,
                               uint64_t most_branches, uint64_t least_match, int32_t* nodes);

// --- single operations, for tests (op_abi.cpp) ---------------------------------------------------------------------------------------

// A packed matrix as cavectl_pack makes it; bias: [rows], or null.
typedef struct cavectl_matrix {
  const void* data;
  uint64_t bytes, rows, columns;
  const float* bias;
  uint32_t kind;
  int32_t exponent;
} cavectl_matrix;

// Keys and values of one layer, in the layout of kernels.h, with D' = head_dim rounded up to 16 and items of float32, float16 or int8
// (type 0, 1, 2). k: [pages][kv_heads][head_dim][16], v: [pages][kv_heads][16][D'], scales (int8 only): float16 [pages][kv_heads][16].
typedef struct cavectl_op_cache {
  uint32_t type, head_dim;
  uint64_t pages, kv_heads;
  void *k, *v, *k_scale, *v_scale;
} cavectl_op_cache;

// Each runs one kernel of the instruction set `isa` ("": the best). All buffers are dense, row after row; float unless said.
// x [tokens][columns] as int8 q [tokens][columns] and scales [tokens][columns / 32].
int32_t cavectl_op_quantise(const char* isa, const float* x, uint64_t tokens, uint64_t columns, int8_t* q, float* scales, char* error);
// y [tokens][rows] = x W^T + bias, with `add` added to what y holds; the kernel gets `run` panels a call.
int32_t cavectl_op_matmul(const char* isa, const cavectl_matrix* w, const float* x, uint64_t tokens, uint64_t run, int32_t add, float* y,
                          char* error);
// y [tokens][rows] = activation(gate) * up, or activation(up) where gate is null. activation: kernels.h.
int32_t cavectl_op_feed(const char* isa, const cavectl_matrix* gate, const cavectl_matrix* up, uint32_t activation, const float* x,
                        uint64_t tokens, uint64_t run, float* y, char* error);
int32_t cavectl_op_rms_norm(const char* isa, const float* x, const float* weight, uint64_t tokens, uint64_t columns, float epsilon,
                            float* y, char* error);
// Turns the pairs (x[i], x[i + half]) in place; tables [half].
int32_t cavectl_op_rotate(const char* isa, float* x, const float* cosine, const float* sine, uint64_t half, char* error);
// k, v [kv_heads][head_dim] of one token.
int32_t cavectl_op_write_kv(const char* isa, const cavectl_op_cache* cache, uint64_t page, uint64_t slot, const float* k, const float* v,
                            char* error);
// q, out [kv_heads * group][head_dim] of one token at `position`; window 0: it sees all before it.
int32_t cavectl_op_attend(const char* isa, const cavectl_op_cache* cache, const int32_t* pages, uint64_t page_count, uint64_t position,
                          uint64_t window, const float* q, uint64_t group, float scale, float* out, char* error);

// --- the machine (bandwidth.cpp) -----------------------------------------------------------------------------------------------------

// Sums `bytes` of memory with so many threads, `repeats` times over; bytes_per_second receives `repeats` figures. Each thread reads a
// part of its own that it has filled itself. Takes the time that it takes: for benchmarks only.
int32_t cavectl_read_bandwidth(uint64_t bytes, int32_t threads, int32_t repeats, double* bytes_per_second, char* error);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
