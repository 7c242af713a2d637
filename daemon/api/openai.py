"""OpenAI's routes: /v1/models, /v1/chat/completions, /v1/completions, and our /v1/requests/{id}.

Translates their fields to the native request and native events to their chunks; generates nothing itself. Invariant: the chunks of
a stream, put together, say the same as the answer that is not streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

from daemon.answer import Exchange, LiveRequests
from daemon.api.errors import BadField
from daemon.api.fields import OPENAI_CHAT, OPENAI_COMPLETION
from daemon.api.intake import read_fields
from daemon.api.readers import Fields
from daemon.api.reports import chat_logprob, merged, timings_of, usage_of
from daemon.generation import Pipeline, generate
from daemon.request import Delta, Finished, GenerationEvent, NativeRequest, Started, Summary, TokenText
from daemon.store import ModelRecord, Store
from engine.errors import CavectlError
from engine.types import SamplingParams

Kind = Literal["chat", "completion"]
Indexed = tuple[int, GenerationEvent]  # with the index of the prompt


class State(Pipeline, Protocol):
    @property
    def store(self) -> Store: ...
    @property
    def live(self) -> LiveRequests: ...


# --- requests ---------------------------------------------------------------------------------------------------------------------


def _common(fields: Fields) -> dict[str, Any]:
    top_k = fields.get("top_k", default=0)
    sampling = SamplingParams(
        temperature=fields.get("temperature", default=1.0),
        top_k=max(top_k, 0),
        top_p=fields.get("top_p", default=1.0),
        min_p=fields.get("min_p", default=0.0),
        repetition_penalty=fields.get("repetition_penalty", "repeat_penalty", default=1.0),
        repeat_last_n=fields.get("repeat_last_n", default=64),
        presence_penalty=fields.get("presence_penalty", default=0.0),
        frequency_penalty=fields.get("frequency_penalty", default=0.0),
        logit_bias=fields.get("logit_bias", default={}),
    )
    return {
        "model": fields.get("model"),
        "sampling": sampling,
        "seed": fields.get("seed"),
        "max_tokens": fields.get("max_completion_tokens", "max_tokens"),
        "min_tokens": fields.get("min_tokens", default=0),
        "stop": fields.get("stop", default=[]),
        "include_stop": fields.get("include_stop_str_in_output", default=False),
        "stop_ids": fields.get("stop_token_ids", default=[]),
        "ignore_eos": fields.get("ignore_eos", default=False),
        "n": fields.get("n", default=1),
        "priority": fields.get("priority", default="normal"),
        "ctx": fields.get("ctx", "num_ctx"),
        "keep_alive_s": fields.get("keep_alive"),
        "cache_salt": fields.get("cache_salt", default=""),
        "pin_prompt": fields.get("pin_prompt"),
        "speculation": fields.get("speculation", default=True),
    }


def chat_request(fields: Fields) -> NativeRequest:
    messages = fields.get("messages")
    resume = fields.get("continue_final_message", default=False)
    if resume and fields.get("add_generation_prompt", default=False):
        raise BadField("continue_final_message", "`continue_final_message` and `add_generation_prompt` contradict each other")
    if resume and (not messages or messages[-1]["role"] != "assistant"):
        raise BadField("continue_final_message", "`continue_final_message` needs a last message of the assistant")
    logprobs, top = fields.get("logprobs", default=False), fields.get("top_logprobs")
    if top is not None and not logprobs:
        raise BadField("top_logprobs", "`top_logprobs` needs `logprobs` to be true")
    return NativeRequest(
        messages=messages,
        continue_final_message=resume,
        add_generation_prompt=fields.get("add_generation_prompt", default=not resume),
        logprobs=(top or 0) if logprobs else None,
        retention="chat",
        **_common(fields),
    )


def completion_requests(fields: Fields) -> list[NativeRequest]:
    """One native request for each prompt."""
    common = _common(fields)
    return [NativeRequest(prompt=prompt, logprobs=fields.get("logprobs"), **common) for prompt in fields.get("prompt")]


# --- routes -----------------------------------------------------------------------------------------------------------------------


class OpenAi:
    def __init__(self, state: State) -> None:
        self._state = state

    async def chat(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, OPENAI_CHAT)
        await self._answer(exchange, fields, [chat_request(fields)], "chat")

    async def completions(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, OPENAI_COMPLETION)
        await self._answer(exchange, fields, completion_requests(fields), "completion")

    async def _answer(self, exchange: Exchange, fields: Fields, requests: Sequence[NativeRequest], kind: Kind) -> None:
        events = merged([generate(self._state, request, exchange.peer) for request in requests])
        writer = _Writer(exchange, requests[0], kind)
        async with contextlib.aclosing(events):
            if fields.get("stream", default=False):
                options = fields.get("stream_options", default={})
                await writer.stream(events, include_usage=options.get("include_usage", False))
            else:
                await writer.whole(events, choices=len(requests) * requests[0].n)

    async def models(self, exchange: Exchange) -> None:
        records = await asyncio.to_thread(self._state.store.list)
        await exchange.json({"object": "list", "data": [_model(record) for record in records]})

    async def model(self, exchange: Exchange) -> None:
        record = await asyncio.to_thread(self._state.store.get, exchange.path_params["id"])
        await exchange.json(_model(record))

    async def cancel(self, exchange: Exchange) -> None:
        request_id = exchange.path_params["id"]
        if not self._state.live.cancel(request_id, CavectlError("the request was cancelled", code="cancelled")):
            raise CavectlError("no request with that id is in work", code="request_not_found")
        await exchange.json({"id": request_id, "object": "request", "cancelled": True})


def _model(record: ModelRecord) -> dict[str, Any]:
    return {
        "id": record.name,
        "object": "model",
        "created": int(record.modified_at),
        "owned_by": "cavectl",
        "max_model_len": record.info.context_tokens,
        "meta": {
            "n_ctx_train": record.info.context_tokens,
            "n_params": record.info.parameters,
            "n_vocab": record.info.vocab_size,
            "n_embd": record.info.embedding_length,
            "size": record.info.weight_bytes,
        },
    }


# --- answers ----------------------------------------------------------------------------------------------------------------------


class _Writer:
    """The chunks of one stream, or the one object that says the same."""

    def __init__(self, exchange: Exchange, request: NativeRequest, kind: Kind) -> None:
        self._exchange, self._kind, self._per_prompt = exchange, kind, request.n
        self._id = ("chatcmpl-" if kind == "chat" else "cmpl-") + exchange.id.removeprefix("req-")
        self._created = int(time.time())
        self._model = request.model
        self._seed = 0
        self._summaries: list[Summary] = []
        self._opened: set[int] = set()
        self._offsets: dict[int, int] = {}

    def _head(self, object_: str) -> dict[str, Any]:
        return {"id": self._id, "object": object_, "created": self._created, "model": self._model, "system_fingerprint": None}

    def _choice(self, prompt: int, choice: int) -> int:
        return prompt * self._per_prompt + choice

    def _note(self, event: Started | Summary) -> None:
        if isinstance(event, Started):
            self._model, self._seed = event.model, event.seed
        else:
            self._summaries.append(event)

    async def stream(self, events: AsyncGenerator[Indexed, None], *, include_usage: bool) -> None:
        self._exchange.streaming = True
        async for prompt, event in events:
            match event:
                case Delta():
                    await self._open(self._choice(prompt, event.choice))
                    await self._send(self._delta_choice(prompt, event))
                case Finished():
                    index = self._choice(prompt, event.choice)
                    await self._open(index)
                    await self._exchange.event(self._chunk([self._piece(index, "", event.reason)]) | {"seed": self._seed})
                case Started() | Summary():
                    self._note(event)
        if include_usage:
            await self._exchange.event(self._chunk([]) | self._totals())
        await self._exchange.end()

    async def _open(self, index: int) -> None:
        """A chat's first chunk of each choice carries the role."""
        if self._kind == "chat" and index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant", "content": ""}
            await self._send({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    async def _send(self, choice: dict[str, Any]) -> None:
        await self._exchange.event(self._chunk([choice]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        object_ = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return self._head(object_) | {"choices": choices}

    def _delta_choice(self, prompt: int, delta: Delta) -> dict[str, Any]:
        index = self._choice(prompt, delta.choice)
        return self._piece(index, delta.text, None, self._logprobs(index, [delta]))

    def _piece(self, index: int, text: str, reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        if self._kind == "completion":
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": logprobs, "finish_reason": reason}

    async def whole(self, events: AsyncGenerator[Indexed, None], *, choices: int) -> None:
        deltas: list[list[Delta]] = [[] for _ in range(choices)]
        reasons = [""] * choices
        async for prompt, event in events:
            match event:
                case Delta():
                    deltas[self._choice(prompt, event.choice)].append(event)
                case Finished():
                    reasons[self._choice(prompt, event.choice)] = event.reason
                case Started() | Summary():
                    self._note(event)
        object_ = "chat.completion" if self._kind == "chat" else "text_completion"
        body = [self._whole_choice(index, deltas[index], reasons[index]) for index in range(choices)]
        await self._exchange.json(self._head(object_) | {"choices": body} | self._totals())

    def _whole_choice(self, index: int, deltas: list[Delta], reason: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        logprobs = self._logprobs(index, deltas)
        if self._kind == "completion":
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _totals(self) -> dict[str, Any]:
        return {"usage": usage_of(self._summaries), "timings": timings_of(self._summaries), "seed": self._seed}

    def _logprobs(self, index: int, deltas: list[Delta]) -> dict[str, Any] | None:
        tokens = [token for delta in deltas for token in delta.tokens]
        if not tokens:
            return None
        if self._kind == "chat":
            return {"content": [chat_logprob(token) for token in tokens], "refusal": None}
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(_characters(token.data) for token in tokens)
        return _completion_logprobs(tokens, offset)


def _completion_logprobs(tokens: list[TokenText], offset: int) -> dict[str, Any]:
    """`offset` is where the first token begins in the text, in characters. Of equal spellings the likeliest stays."""
    before = [offset + sum(_characters(token.data) for token in tokens[:number]) for number in range(len(tokens))]
    return {
        "tokens": [_spelling(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_spelling(data): logprob for data, logprob in reversed(token.top)} for token in tokens],
        "text_offset": [start - _continues(token.data) for start, token in zip(before, tokens, strict=True)],
    }


def _characters(data: bytes) -> int:
    """Characters that begin in `data`, which may end or begin inside one."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def _continues(data: bytes) -> bool:
    return data[:1] != b"" and data[0] & 0xC0 == 0x80


def _spelling(data: bytes) -> str:
    """A token's text; the legacy API spells parts of a character out, so that different ones differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
