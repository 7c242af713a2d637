"""From a request to the token ids that the engine reads: render, encode, check that it fits, drop old messages where allowed.

Owns the rules of the context: a prompt that does not fit is refused with both numbers; only `truncate` lets the oldest go, and then
it is said how much went. Not here: what rendering and encoding mean (daemon/text). Invariant: what is returned is the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daemon.api.errors import BadField
from daemon.loaded_model import LoadedModel
from daemon.request import NativeRequest
from daemon.text.chat_template import TemplateHost
from daemon.text.tokenizer import Piece
from engine.errors import CavectlError, ContextLengthExceeded, InvalidRequest

MAX_RENDERED_BYTES = 64 << 20  # of a chat; a smaller context bounds it further, by its longest tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """`dropped_messages` and `dropped_tokens` say what `truncate` took away."""

    ids: list[int]
    dropped_messages: int = 0
    dropped_tokens: int = 0


async def prepare(host: TemplateHost, model: LoadedModel, request: NativeRequest) -> Prompt:
    """The prompt of `request` for `model`. Raises CavectlError: empty, too long, not renderable, ids that are no tokens."""
    if request.messages is not None:
        prompt = await _Chat(host, model, request).prompt()
    else:
        prompt = await _plain(model, request)
    if not prompt.ids:
        raise BadField(request.prompt_field, "the prompt is empty: it has no tokens")
    return prompt


def room_for_output(request: NativeRequest, context_tokens: int) -> int:
    """How much of the context a truncated prompt leaves free: what was asked for, at most half."""
    half = max(1, context_tokens // 2)
    return min(request.max_tokens or max(1, context_tokens // 4), half)


async def _plain(model: LoadedModel, request: NativeRequest) -> Prompt:
    context = request.context(model.context_tokens)
    if isinstance(request.prompt, list):
        ids = _checked_ids(request, model.tokenizer.vocab_size)
    else:
        text = request.prompt or ""
        if not request.truncate:
            model.tokenizer.refuse_if_hopeless(len(text.encode()), context)
        ids = await model.tokenizer.encode_async([Piece(text, special=True)], add_special=bool(text))
    if len(ids) < context:
        return Prompt(ids)
    if not request.truncate:
        raise ContextLengthExceeded(prompt_tokens=len(ids), context_tokens=context)
    keep = context - room_for_output(request, context)
    start = [ids[0]] if ids[0] == model.tokenizer.bos_id else []
    kept = start + ids[len(ids) - (keep - len(start)) :]
    return Prompt(kept, dropped_tokens=len(ids) - len(kept))


def _checked_ids(request: NativeRequest, vocab_size: int) -> list[int]:
    assert isinstance(request.prompt, list)
    wrong = next((token for token in request.prompt if token >= vocab_size), None)
    if wrong is not None:
        raise BadField(request.prompt_field, f"token id {wrong} is not in the vocabulary of {vocab_size} tokens")
    return request.prompt


class _Chat:
    """Renders and encodes a chat, and with `truncate` finds the longest tail of it that fits."""

    def __init__(self, host: TemplateHost, model: LoadedModel, request: NativeRequest) -> None:
        self._host, self._model, self._request = host, model, request
        self._context = request.context(model.context_tokens)

    async def prompt(self) -> Prompt:
        messages = self._request.messages or []
        if not messages:
            raise BadField("messages", "`messages` is empty: at least one message is needed")
        if not self._request.truncate:
            return Prompt(await self._encode(messages))
        return await self._truncated(messages)

    async def _truncated(self, messages: list[dict[str, Any]]) -> Prompt:
        """Bisect for the fewest old messages to drop. System messages at the start and the last message stay."""
        if (ids := await self._encoded_if_fits(messages, room=1)) is not None:
            return Prompt(ids)
        head = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        low, high, best = 1, len(messages) - head - 1, None
        room = room_for_output(self._request, self._context)
        while low <= high:
            middle = (low + high) // 2
            ids = await self._encoded_if_fits(messages[:head] + messages[head + middle :], room)
            if ids is None:
                low = middle + 1
            else:
                best, high = Prompt(ids, dropped_messages=middle), middle - 1
        return best or Prompt(await self._encode(messages[:head] + messages[-1:]))

    async def _encoded_if_fits(self, messages: list[dict[str, Any]], room: int) -> list[int] | None:
        try:
            ids = await self._encode(messages)
        except CavectlError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return ids if len(ids) + room <= self._context else None

    async def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._model.tokenizer
        tokenizer.refuse_if_hopeless(sum(len(message["content"].encode()) for message in messages), self._context)
        pieces = await self._render(messages)
        ids = await tokenizer.encode_async(pieces, add_special=True)
        if len(ids) >= self._context:
            raise ContextLengthExceeded(prompt_tokens=len(ids), context_tokens=self._context)
        return ids

    async def _render(self, messages: list[dict[str, Any]]) -> list[Piece]:
        if self._model.template is None:
            raise InvalidRequest(
                f"{self._model.name} has no chat template",
                hint="use /v1/completions, or /api/generate with raw",
                code="unsupported",
            )
        tokenizer = self._model.tokenizer
        return await self._host.render(
            self._model.template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            specials=list(tokenizer.special_tokens),
            max_output_bytes=min(MAX_RENDERED_BYTES, self._context * tokenizer.max_token_bytes),
            add_generation_prompt=self._request.add_generation_prompt,
            continue_final_message=self._request.continue_final_message,
        )
