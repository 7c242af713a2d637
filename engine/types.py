"""What crosses process and layer borders as plain data: requests, frames between daemon and worker, model facts.

No torch, no I/O. The daemon imports of the engine only this module, `engine.config` and `engine.errors`.
Frames are msgpack (msgspec), each preceded by its length as 4 bytes little-endian, over an inherited stream socketpair.
Invariant: the engine deals in token ids only; text stays in the daemon.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.errors import ErrorInfo

Priority = Literal["high", "normal", "low"]
FinishReason = Literal["stop", "length", "abort", "error"]
Retention = Literal["rest", "chat"]  # how long an unused prefix may stay cached
WeightFormat = Literal["gguf", "safetensors"]

MAX_FRAME_BYTES = 64 << 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence picks its tokens. The defaults change nothing: plain sampling from the model's distribution.

    Order of application: logit bias, repetition penalty, presence and frequency penalties, stop ids masked below `min_tokens`;
    then temperature; top-k, top-p, min-p; then one draw. temperature 0 is argmax, ties to the lower id.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = 64  # over prompt + output; 0: off, -1: the whole sequence
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 64 bits unsigned; the daemon always fills it in


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the engine sees it. `id` is unique within a worker's life; a client's own ids never come here."""

    id: int
    prompt: list[int]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int  # the daemon has clamped it to context - prompt
    min_tokens: int = 0
    stop_ids: list[int] = []  # ids that end the sequence (end-of-generation ids included unless ignore_eos)
    n: int = 1
    logprobs: int | None = None  # None: off; 0: of the chosen token; k: and the k best
    priority: Priority = "normal"
    client: str = ""  # whom to be fair to
    salt: str = ""  # isolates cached prefixes
    adapter: str = ""  # content digest of the adapter; opaque here, splits the cache
    retention: Retention = "rest"
    pin: bool | None = None  # True: the prompt's pages are never evicted; False: no longer pinned; None: as they are
    speculation: bool = True  # whether tokens may be drafted; the answer is the same
    waited_ms: float = 0.0  # in the queue of an earlier worker, which ended before it began


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One new token. `logprob` is of the model's own distribution (float32 logits before penalties and filters)."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []  # best first


class SequenceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Comes with the last output of a sequence."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float  # arrival to first scheduled
    prefill_ms: float  # first scheduled to first token
    decode_ms: float  # first token to last
    drafted_tokens: int = 0  # that speculation guessed, and those that were right
    accepted_tokens: int = 0


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one sequence (`choice` of 0..n-1). `finish` is set exactly once, with `usage`."""

    request: int
    choice: int = 0
    tokens: list[TokenOutput] = []
    finish: FinishReason | None = None
    stop_id: int | None = None  # the stop id that ended it: among `tokens` as the last one, never text
    error: ErrorInfo | None = None
    usage: SequenceUsage | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine after a step, for `ps` and `/metrics`."""

    step: int
    step_ms: float
    running: int
    waiting: int
    prefill_tokens: int  # in this step
    decode_tokens: int  # in this step
    pages_total: int
    pages_used: int  # held by running sequences
    pages_cached: int  # held by the prefix cache alone, free to be evicted
    pages_pinned: int  # held by the prefix cache alone, for ever
    chunk_tokens: int = 0  # prompt tokens that a step takes beside decodes, as adapted by now
    preemptions: int = 0  # these and those below since the start
    evicted_pages: int = 0
    hit_tokens: int = 0  # prompt tokens taken from the cache
    accounting_errors: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


# --- model facts, read without loading weights (python -m engine.inspect PATH) -------------------------------------------------


class GgufVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`tokenizer.ggml.*` as read; checked for shape (S10), not yet understood."""

    model: str  # "gpt2" (byte-level BPE), "llama" (BPE by score with byte fallback), ...
    pre: str  # pre-tokenizer name, "" when absent
    tokens: list[str]
    scores: list[float]  # empty when absent
    token_types: list[int]  # 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; empty when absent
    merges: list[str]
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eot_id: int | None = None
    eom_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool | None = None
    remove_extra_whitespaces: bool | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model folder or GGUF file says of itself. `config` uses the keys of a Hugging Face config.json in both cases."""

    format: WeightFormat
    architecture: str  # model_type, e.g. "llama"
    name: str  # what the file calls itself, "" when it does not
    parameters: int
    weight_bytes: int
    quantization: str  # "Q4_1", "BF16", ...: the type that holds most bytes
    context_tokens: int  # trained context
    embedding_length: int
    layers: int
    vocab_size: int
    config: dict[str, Any]
    metadata: dict[str, str | int | float | bool]  # GGUF scalars, or config.json scalars; for `show`
    chat_template: str | None = None  # GGUF only; folders keep theirs in files
    vocabulary: GgufVocabulary | None = None  # GGUF only
    warnings: list[str] = []


class PackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m engine.pack` did. `made`: False when the packed file was there already and good."""

    made: bool
    source_bytes: int
    packed_bytes: int
    pack_ms: float
    notes: list[str] = []  # for a person, as the loader would warn


# --- frames ------------------------------------------------------------------------------------------------------------------


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a worker needs to load one model. Sent as the first frame; the worker reads no environment and no config file."""

    model_path: str  # a .gguf file or a folder with config.json and safetensors
    format: WeightFormat
    backend: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    device: str = "cpu"
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    kv_dtype: Literal["auto", "float64", "float32", "bfloat16", "float16", "int8"] = "auto"  # auto: the backend's own
    context_tokens: int  # longest sequence, prompt + output
    kv_memory_bytes: int | None = None  # None: sized from measured free memory
    memory_bytes: int | None = None  # for weights, cache and work together at most; None: what is free
    threads: int | None = None  # None: physical cores
    isa: str = ""  # instruction set of the native backend; "": the best that this machine has
    max_step_tokens: int = 512
    max_sequences: int = 64
    target_step_ms: float = 50.0  # time between two tokens of a stream that prompt chunks are cut for
    aging_s: float = 30.0  # a request that waited so long counts one priority class up
    prefix_cache: bool = True
    chat_retention_s: float = 1800.0  # how long an unused prefix of a chat stays cached
    rest_retention_s: float = 300.0  # and any other
    accounting_interval_s: float = 1.0  # how often the accounts of the cache are checked
    speculation: bool = True  # whether tokens are drafted where that pays
    model_digest: str = ""  # part of the cache's keys
    packed_path: str = ""  # where the packed weights are, or are to be put; "": they are packed anew and kept nowhere
    weights_digest: str = ""  # of the weight files' bytes: packed weights made from others are stale
    parent_pid: int = 0  # the worker ends when this process is gone


class LoadedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that is ready has in hand."""

    architecture: str
    backend: str
    device: str
    dtype: str
    kv_dtype: str
    context_tokens: int
    vocab_size: int
    parameters: int
    weight_bytes: int  # resident
    kv_bytes: int
    pages_total: int
    page_tokens: int
    threads: int
    isa: str = ""  # instruction set of the native backend's kernels
    drafter: str = ""  # what drafts tokens; "": nothing does
    load_ms: float
    degraded: list[str] = []  # one line each: what runs slower or differently than asked, and why


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    config: WorkerConfig


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: EngineRequest


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    request: int
    choice: int | None = None  # None: all choices


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """Let sequences be longer, without loading again. Answered by Grown; requests go on meanwhile, between two steps."""

    context_tokens: int


Command = LoadModel | AddRequest | AbortRequest | Shutdown | Grow


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    stage: str
    fraction: float  # 0..1


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    info: LoadedInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot go on (load failed, or an unattributable step error) and exits after this frame."""

    error: ErrorInfo


class StepResult(msgspec.Struct, frozen=True, tag="step"):
    outputs: list[SequenceOutput]
    stats: EngineStats


class Scheduled(msgspec.Struct, frozen=True, tag="scheduled"):
    """These requests are part of the step that begins now, for the first time. Whoever is not named has touched nothing yet."""

    requests: list[int]


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """The answer to Grow: what holds now, and why it is not what was asked. `reload`: loading again would do it."""

    info: LoadedInfo
    error: ErrorInfo | None = None
    reload: bool = False


Event = LoadProgress | Loaded | Failed | StepResult | Scheduled | Grown
