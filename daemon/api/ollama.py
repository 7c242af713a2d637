"""Ollama's routes that generate: /api/chat and /api/generate, NDJSON or one object, and loading and unloading through them.

Translates fields to the native request and native events to lines; generates nothing itself. Durations are nanoseconds. Invariant:
the last line has `done`, the counts and the durations; a stream without it did not finish.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, Literal

from daemon.answer import Exchange
from daemon.api.errors import BadField
from daemon.api.fields import OLLAMA_CHAT, OLLAMA_GENERATE
from daemon.api.intake import read_fields
from daemon.api.openai import State
from daemon.api.readers import Fields
from daemon.api.reports import chat_logprob, timings_of, usage_of
from daemon.generation import generate
from daemon.request import Delta, Finished, GenerationEvent, NativeRequest, Started, Summary
from engine.types import SamplingParams

Kind = Literal["chat", "generate"]

NS_PER_MS = 1_000_000


def timestamp(moment: float | None = None) -> str:
    """RFC 3339 in UTC, now unless a Unix time is given."""
    when = datetime.now(UTC) if moment is None else datetime.fromtimestamp(moment, UTC)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _common(fields: Fields) -> dict[str, Any]:
    """The defaults are those of this dialect, which are not OpenAI's."""
    options = Fields(fields.get("options", default={}), [])
    sampling = SamplingParams(
        temperature=options.get("temperature", default=0.8),
        top_k=max(options.get("top_k", default=40), 0),
        top_p=options.get("top_p", default=0.9),
        min_p=options.get("min_p", default=0.0),
        repetition_penalty=options.get("repetition_penalty", "repeat_penalty", default=1.0),
        repeat_last_n=options.get("repeat_last_n", default=64),
        presence_penalty=options.get("presence_penalty", default=0.0),
        frequency_penalty=options.get("frequency_penalty", default=0.0),
    )
    seed = options.get("seed")
    predict = options.get("num_predict", default=-1)
    return {
        "model": fields.get("model"),
        "sampling": sampling,
        "seed": None if seed is None or seed < 0 else seed,  # negative: draw one
        "max_tokens": None if predict < 0 else predict,
        "stop": options.get("stop", default=[]),
        "logprobs": _logprobs(fields),
        "truncate": fields.get("truncate", default=False),
        "priority": fields.get("priority", default="normal"),
        "ctx": fields.get("ctx", default=options.get("num_ctx")),
        "keep_alive_s": fields.get("keep_alive"),
        "cache_salt": fields.get("cache_salt", default=""),
        "pin_prompt": fields.get("pin_prompt"),
        "speculation": fields.get("speculation", default=True),
    }


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.get("logprobs", default=False), fields.get("top_logprobs")
    if top is not None and not wanted:
        raise BadField("top_logprobs", "`top_logprobs` needs `logprobs` to be true")
    return (top or 0) if wanted else None


def chat_request(fields: Fields) -> NativeRequest:
    """A last message of the assistant is continued, not answered."""
    messages = fields.get("messages", default=[])
    resume = bool(messages) and messages[-1]["role"] == "assistant"
    return NativeRequest(
        messages=messages,
        continue_final_message=resume,
        add_generation_prompt=not resume,
        prompt_field="messages",
        retention="chat",
        **_common(fields),
    )


def generate_request(fields: Fields) -> NativeRequest:
    """`prompt` is a user's message, or with `raw` the whole text as the model gets it."""
    prompt, system = fields.get("prompt", default=""), fields.get("system", default="")
    if fields.get("raw", default=False):
        if system:
            raise BadField("system", "`system` and `raw` contradict each other: a raw prompt is taken as it is")
        return NativeRequest(prompt=prompt, **_common(fields))
    messages = [{"role": "system", "content": system}] if system else []
    return NativeRequest(messages=[*messages, {"role": "user", "content": prompt}], **_common(fields))


class Ollama:
    def __init__(self, state: State) -> None:
        self._state = state

    async def chat(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, OLLAMA_CHAT)
        request = chat_request(fields)
        await self._answer(exchange, fields, request, "chat", empty=not request.messages)

    async def generate(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, OLLAMA_GENERATE)
        await self._answer(exchange, fields, generate_request(fields), "generate", empty=not fields.get("prompt"))

    async def _answer(self, exchange: Exchange, fields: Fields, request: NativeRequest, kind: Kind, *, empty: bool) -> None:
        writer = _Writer(exchange, request.model, kind)
        if empty:
            await exchange.json(writer.line("") | {"done": True} | await self._load_or_unload(request))
            return
        async with contextlib.aclosing(generate(self._state, request, exchange.peer)) as events:
            if fields.get("stream", default=True):
                await writer.stream(events)
            else:
                await writer.whole(events)

    async def _load_or_unload(self, request: NativeRequest) -> dict[str, Any]:
        """A request without a prompt only moves the model. `was_loaded`: whether there was one to unload."""
        if request.keep_alive_s == 0:
            return {"done_reason": "unload", "was_loaded": await self._state.models.unload(request.model)}
        async with self._state.models.lease(request.model, ctx=request.ctx, keep_alive_s=request.keep_alive_s):
            return {"done_reason": "load"}


class _Writer:
    def __init__(self, exchange: Exchange, model: str, kind: Kind) -> None:
        self._exchange, self._model, self._kind = exchange, model, kind
        self._started: Started | None = None
        self._reason = "stop"

    def line(self, text: str) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self._kind == "chat" else {"response": text}
        return {"model": self._model, "created_at": timestamp(), **content, "done": False}

    async def stream(self, events: AsyncGenerator[GenerationEvent, None]) -> None:
        async for event in events:
            match event:
                case Delta():
                    await self._exchange.event(self.line(event.text) | _scores([event]))
                case Summary():
                    await self._exchange.event(self.line("") | self._totals(event))
                case Started() | Finished():
                    self._note(event)
        await self._exchange.end()

    async def whole(self, events: AsyncGenerator[GenerationEvent, None]) -> None:
        deltas: list[Delta] = []
        async for event in events:
            match event:
                case Delta():
                    deltas.append(event)
                case Summary():
                    line = self.line("".join(delta.text for delta in deltas))
                    await self._exchange.json(line | _scores(deltas) | self._totals(event))
                case Started() | Finished():
                    self._note(event)

    def _note(self, event: Started | Finished) -> None:
        if isinstance(event, Finished):
            self._reason = event.reason
            return
        self._started = event
        self._model = event.model
        if event.dropped_messages or event.dropped_tokens:
            self._exchange.headers["X-Cavectl-Truncated"] = f"messages={event.dropped_messages}, tokens={event.dropped_tokens}"

    def _totals(self, summary: Summary) -> dict[str, Any]:
        started = self._started
        assert started is not None
        truncated = {"messages": started.dropped_messages, "tokens": started.dropped_tokens}
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": round(summary.total_ms * NS_PER_MS),
            "load_duration": round(summary.load_ms * NS_PER_MS),
            "prompt_eval_count": summary.prompt_tokens,
            "prompt_eval_duration": round(summary.prompt_ms * NS_PER_MS),
            "eval_count": summary.output_tokens,
            "eval_duration": round(summary.predicted_ms * NS_PER_MS),
            "seed": started.seed,
            "context_length": started.context_tokens,
            "usage": usage_of([summary]),
            "timings": timings_of([summary]),
        } | ({"truncated": truncated} if any(truncated.values()) else {})


def _scores(deltas: list[Delta]) -> dict[str, Any]:
    tokens = [token for delta in deltas for token in delta.tokens]
    return {"logprobs": [chat_logprob(token) for token in tokens]} if tokens else {}
