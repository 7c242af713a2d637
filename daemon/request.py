"""The one request that every dialect translates to, and the events that every dialect translates from.

Plain data. What a field may hold was checked when it was read (daemon/api/fields.py); what depends on the model is checked in
daemon/prompt.py and daemon/generation.py. Invariant: nothing here knows a dialect's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine.types import Priority, Retention, SamplingParams


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `messages` (a chat, rendered through the model's template) or `prompt` (text or token ids, taken as it is)."""

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    prompt_field: str = "prompt"  # where it came from, for errors
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate: bool = False
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None  # None: one is drawn, and told
    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    stop: list[str] = []
    include_stop: bool = False
    stop_ids: list[int] = []
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    priority: Priority = "normal"
    ctx: int | None = None  # None: all that the model was loaded with
    keep_alive_s: float | None = None
    cache_salt: str = ""  # only requests with the same one share what is cached
    speculation: bool = True  # whether tokens may be drafted; the answer is the same
    pin_prompt: bool | None = None  # whether the prompt stays cached for ever; None: as it is
    retention: Retention = "rest"

    def context(self, loaded: int) -> int:
        """How many tokens prompt and output may have in a model that was loaded with room for `loaded`."""
        return loaded if self.ctx is None else min(self.ctx, loaded)


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the engine's hands. Nothing was generated yet."""

    model: str
    prompt_tokens: int
    context_tokens: int  # of this request: prompt and output
    seed: int
    load_ms: float
    dropped_messages: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as a log-probability entry. `top`: the best tokens of that position, best first."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of one choice that is certain. `tokens` only when log-probabilities were asked for."""

    choice: int
    text: str
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    choice: int
    reason: Literal["stop", "length"]
    stop: str | None = None  # the stop string found


@dataclass(frozen=True, slots=True)
class Summary:
    """The last event. Counts tokens, never events; times in milliseconds.

    `drafted_tokens` are what speculation guessed, of which `accepted_tokens` were right. `prompt_ms`: first scheduled to first
    token; `predicted_ms`: first token to last; `ttft_ms`: arrival here to first token.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    queue_ms: float
    prompt_ms: float
    predicted_ms: float
    ttft_ms: float
    load_ms: float
    total_ms: float


GenerationEvent = Started | Delta | Finished | Summary
