"""Every request field of every dialect, in one place: honoured, refused, or without effect.

The tables are read by the routes and by the tests, and are closed: a field in none of the three classes is refused by name, so no
field is ever ignored in silence. Bounds stand here, so nothing later sees a number out of range or a list too long.
"""

from __future__ import annotations

from daemon.api.messages import OLLAMA_MESSAGES, OPENAI_MESSAGES
from daemon.api.readers import Field, Flag, Int, KeepAlive, LogitBias, Num, OneOf, Prompts, StopStrings, Str, Table, TokenIds

MAX_INT = (1 << 31) - 1
NAME = Str(1024)
SEED = Int(-(1 << 63), (1 << 64) - 1)
TEXT = Str()


def _refused(*names: str, neutral: tuple[object, ...] = ()) -> list[Field]:
    return [Field(name, kind="refused", neutral=neutral) for name in names]


def _no_effect(*names: str) -> list[Field]:
    return [Field(name, kind="no_effect") for name in names]


# --- sampling, spelled alike everywhere -------------------------------------------------------------------------------------------

_SAMPLING = [
    Field("temperature", Num(0, 100)),
    Field("top_p", Num(0, 1)),
    Field("top_k", Int(-1, MAX_INT)),
    Field("min_p", Num(0, 1)),
    Field("repeat_penalty", Num(0, 10, above=True)),
    Field("repeat_last_n", Int(-1, MAX_INT)),
    Field("presence_penalty", Num(-2, 2)),
    Field("frequency_penalty", Num(-2, 2)),
    Field("seed", SEED),
    Field("stop", StopStrings()),
]

_OURS = [
    Field("keep_alive", KeepAlive()),
    Field("ctx", Int(1, MAX_INT)),
    Field("priority", OneOf(("high", "normal", "low"))),
    Field("cache_salt", Str(256)),
    Field("pin_prompt", Flag()),
    Field("speculation", Flag()),
]

# --- OpenAI -----------------------------------------------------------------------------------------------------------------------

_STREAM_OPTIONS = Table.of(
    [Field("include_usage", Flag())],
    _no_effect("include_obfuscation"),
)

_RESPONSE_FORMAT = ({"type": "text"},)

_OPENAI = [
    *_SAMPLING,
    *_OURS,
    Field("model", NAME, required=True),
    Field("stream", Flag()),
    Field("stream_options", _STREAM_OPTIONS),
    Field("max_tokens", Int(1, MAX_INT)),
    Field("n", Int(1, 16), nullable=False),
    Field("num_ctx", Int(1, MAX_INT)),
    Field("repetition_penalty", Num(0, 10, above=True)),
    Field("logit_bias", LogitBias()),
    Field("min_tokens", Int(0, MAX_INT)),
    Field("ignore_eos", Flag()),
    Field("stop_token_ids", TokenIds(64)),
    Field("include_stop_str_in_output", Flag()),
    *_refused("response_format", neutral=_RESPONSE_FORMAT),
    *_refused("grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "structured_outputs"),
    *_refused("typical_p", neutral=(1, 1.0)),
    *_refused("profile", "lora", neutral=("",)),
    *_refused("return_progress", neutral=(False,)),
    *_no_effect("user", "metadata", "store", "service_tier", "safety_identifier", "cache_prompt", "prompt_cache_key"),
    *_no_effect("prompt_cache_retention", "id_slot", "timings_per_token"),
]

OPENAI_CHAT = Table.of(
    _OPENAI,
    [
        Field("messages", OPENAI_MESSAGES, required=True),
        Field("max_completion_tokens", Int(1, MAX_INT)),
        Field("logprobs", Flag()),
        Field("top_logprobs", Int(0, 20)),
        Field("add_generation_prompt", Flag()),
        Field("continue_final_message", Flag()),
    ],
    _refused("tools", "functions", neutral=([],)),
    _refused("tool_choice", "function_call", neutral=("none", "auto")),
    _refused("parallel_tool_calls", neutral=(True, False)),
    _refused("reasoning_effort", neutral=("none",)),
    _refused("modalities", neutral=(["text"],)),
    _refused("verbosity", neutral=("medium",)),
    _refused("audio", "prediction", "web_search_options", "reasoning", "chat_template", "best_of"),
    _refused("chat_template_kwargs", neutral=({},)),
)

OPENAI_COMPLETION = Table.of(
    _OPENAI,
    [
        Field("prompt", Prompts(), required=True),
        Field("logprobs", Int(0, 20)),
    ],
    _refused("suffix", neutral=("",)),
    _refused("echo", neutral=(False,)),
    _refused("best_of", neutral=(1,)),
)

# --- Ollama -----------------------------------------------------------------------------------------------------------------------

OLLAMA_OPTIONS = Table.of(
    _SAMPLING,
    [
        Field("num_predict", Int(-2, MAX_INT)),
        Field("num_ctx", Int(1, MAX_INT)),
        Field("repetition_penalty", Num(0, 10, above=True)),
    ],
    _refused("typical_p", "tfs_z", neutral=(1, 1.0)),
    _refused("mirostat", neutral=(0,)),
    _refused("mirostat_tau", "mirostat_eta", "penalize_newline", "grammar"),
    [
        Field("num_keep", Int(-1, MAX_INT), "no_effect"),  # of a shifted context; ours is never shifted
        Field("num_batch", Int(1, MAX_INT), "no_effect"),
        Field("num_gpu", Int(-1, MAX_INT), "no_effect"),
        Field("main_gpu", Int(-1, MAX_INT), "no_effect"),
        Field("num_thread", Int(0, MAX_INT), "no_effect"),
        Field("draft_num_predict", Int(0, MAX_INT), "no_effect"),
        *(Field(name, Flag(), "no_effect") for name in ("use_mmap", "use_mlock", "low_vram", "f16_kv", "numa", "vocab_only")),
    ],
)

_OLLAMA = [
    *_OURS,
    Field("model", NAME, required=True),
    Field("stream", Flag()),
    Field("options", OLLAMA_OPTIONS),
    Field("logprobs", Flag()),
    Field("top_logprobs", Int(0, 20)),
    Field("truncate", Flag()),
    *_refused("format", neutral=("",)),
    *_refused("think", "shift", "_debug_render_only", neutral=(False,)),
    *_refused("profile", neutral=("",)),
]

OLLAMA_CHAT = Table.of(
    _OLLAMA,
    [Field("messages", OLLAMA_MESSAGES)],
    _refused("tools", neutral=([],)),
)

OLLAMA_GENERATE = Table.of(
    _OLLAMA,
    [
        Field("prompt", TEXT),
        Field("system", TEXT),
        Field("raw", Flag()),
    ],
    _refused("suffix", "template", neutral=("",)),
    _refused("images", "context", neutral=([],)),
)

_BY_NAME = [Field("model", NAME), Field("name", NAME)]

OLLAMA_SHOW = Table.of(
    _BY_NAME, [Field("verbose", Flag())], _refused("system", "template", neutral=("",)), _refused("options", neutral=({},))
)
OLLAMA_DELETE = Table.of(_BY_NAME)
OLLAMA_PULL = Table.of(
    _BY_NAME,
    [Field("stream", Flag())],
    _refused("insecure", neutral=(False,)),
    _refused("username", "password", neutral=("",)),
)
VERIFY = Table.of(_BY_NAME, [Field("stream", Flag())])
IMPORT = Table.of(
    [
        Field("path", Str(4096), required=True),
        Field("name", NAME),
        Field("mode", OneOf(("auto", "link", "copy", "in-place"))),
        Field("stream", Flag()),
    ]
)

GENERATION_TABLES = {
    "/v1/chat/completions": OPENAI_CHAT,
    "/v1/completions": OPENAI_COMPLETION,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
}
