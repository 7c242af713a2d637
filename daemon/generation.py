"""The one code path that generates: admission, model, prompt, engine, text.

Every dialect calls `generate` and translates its events. Owns the life of a request between the HTTP route and the worker: it is
aborted in the worker when it is closed or cancelled here, whatever it was doing; a worker that dies before it began is followed by
the next. Invariants: one Delta per token that completes text, yielded as soon as its token is here; no text after a stop string;
every choice gets one Finished, and the whole one Summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from daemon.admission import Admission, Ticket
from daemon.api.errors import BadField
from daemon.deaths import RESTARTS
from daemon.loaded_model import LoadedModel
from daemon.metrics import Metrics
from daemon.models import ModelManager
from daemon.output_stream import OutputStream, WorkerLost
from daemon.prompt import Prompt, prepare
from daemon.request import Delta, Finished, GenerationEvent, NativeRequest, Started, Summary, TokenText
from daemon.security import PeerInfo
from daemon.text.chat_template import TemplateHost
from daemon.text.detokenizer import Detokenizer
from daemon.text.stop import StopMatcher
from daemon.text.tokenizer import Tokenizer
from engine.errors import CavectlError
from engine.types import EngineRequest, SequenceOutput, SequenceUsage, TokenOutput

log = logging.getLogger("cavectl.generation")

MAX_COST_TOKENS = 1 << 20  # n x max_tokens
USAGE_WAIT_S = 1.0  # for the engine's own counts after a stop string: it answers after the step it is in
SEED_BITS = 53  # of a drawn seed: survives clients whose numbers are doubles


class Pipeline(Protocol):
    """What generation needs of the daemon's state."""

    @property
    def admission(self) -> Admission: ...
    @property
    def models(self) -> ModelManager: ...
    @property
    def templates(self) -> TemplateHost: ...
    @property
    def metrics(self) -> Metrics: ...


async def generate(state: Pipeline, request: NativeRequest, peer: PeerInfo) -> AsyncGenerator[GenerationEvent, None]:
    """Run one request. Raises CavectlError, before Started or after. Close it (aclose) to cancel."""
    arrived = time.perf_counter()
    with state.admission.enter() as ticket:
        lease = state.models.lease(request.model, ctx=request.ctx, keep_alive_s=request.keep_alive_s)
        run: _Run | None = None
        for restarts_left in range(RESTARTS, -1, -1):
            try:
                async with lease as model:
                    if run is None:
                        arrival = _Arrival(ticket, arrived, _ms_since(arrived))
                        run = _Run(model, request, await prepare(state.templates, model, request), arrival)
                    async with contextlib.aclosing(run.events(model, _client(peer))) as events:
                        async for event in events:
                            if isinstance(event, Summary):
                                state.metrics.count(event)
                                _log_finished(model.name, event)
                            yield event
                return
            except WorkerLost:
                if run is None or not restarts_left:
                    raise
            lease = state.models.lease_next(run.model)


@dataclass(frozen=True, slots=True)
class _Arrival:
    ticket: Ticket
    at: float  # perf_counter
    load_ms: float  # waited for the model


class _Run:
    """One admitted request with its prompt: from the engine's outputs to events. `model` is the one that has it now."""

    def __init__(self, model: LoadedModel, request: NativeRequest, prompt: Prompt, arrival: _Arrival) -> None:
        self.model = model
        self._request, self._prompt, self._arrival = request, prompt, arrival
        self._asked: EngineRequest | None = None  # as the engine was asked the first time
        self._submitted = 0.0
        self._choices = [_Choice(index, model.tokenizer, request) for index in range(request.n)]
        self._context = request.context(model.context_tokens)
        self._first: float | None = None
        self._last = arrival.at

    async def events(self, model: LoadedModel, client: str) -> AsyncGenerator[GenerationEvent, None]:
        """Raises WorkerLost when the worker ended before it began: call again with the model that follows, and all goes on."""
        self.model = model
        if self._asked is None:
            self._asked = self._engine_request(client)
            self._submitted = time.perf_counter()
            yield self._started(self._asked)
        if self._asked.max_tokens == 0:  # nothing to generate: only the prompt's length is told
            for choice in self._choices:
                yield Finished(choice.index, "length")
            yield self._summary()
            return
        worker = model.worker
        waited_ms = _ms_since(self._submitted)
        stream = worker.submit(msgspec.structs.replace(self._asked, id=worker.next_id(), waited_ms=waited_ms))
        try:
            while any(not choice.finished for choice in self._choices):
                output = await stream.get()
                for event in self._take(stream, output):
                    yield event
            await self._await_usage(stream)
        finally:
            stream.close()
        yield self._summary()

    def _started(self, request: EngineRequest) -> Started:
        return Started(
            model=self.model.name,
            prompt_tokens=len(self._prompt.ids),
            context_tokens=self._context,
            seed=request.sampling.seed,
            load_ms=self._arrival.load_ms,
            dropped_messages=self._prompt.dropped_messages,
            dropped_tokens=self._prompt.dropped_tokens,
        )

    def _take(self, stream: OutputStream, output: SequenceOutput) -> Iterator[GenerationEvent]:
        """Events of one output. A choice that a stop string ended is only listened to for its usage."""
        choice = self._choices[output.choice]
        choice.usage = output.usage or choice.usage
        if choice.finished:
            return
        if output.tokens:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._arrival.ticket.served()
        yield from choice.push(output)
        if choice.stopped is not None and output.finish is None:
            stream.abort(choice.index)

    async def _await_usage(self, stream: OutputStream) -> None:
        """After stop strings the engine's counts come one step later; a worker that dies meanwhile costs only them."""
        with contextlib.suppress(TimeoutError, CavectlError):
            async with asyncio.timeout(USAGE_WAIT_S):
                while any(choice.usage is None for choice in self._choices):
                    output = await stream.get()
                    self._choices[output.choice].usage = output.usage

    def _engine_request(self, client: str) -> EngineRequest:
        request, prompt = self._request, self._prompt.ids
        max_tokens = self._context - len(prompt)
        if request.max_tokens is not None:
            max_tokens = min(max_tokens, request.max_tokens)
        if request.n * max_tokens > MAX_COST_TOKENS:
            raise BadField("n", f"{request.n} choices of {max_tokens} tokens are more than {MAX_COST_TOKENS} in all")
        self._check_ids("logit_bias", request.sampling.logit_bias)
        self._check_ids("stop_token_ids", request.stop_ids)
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed & ((1 << 64) - 1)
        ends = set(request.stop_ids) if request.ignore_eos else self.model.tokenizer.end_ids.union(request.stop_ids)
        return EngineRequest(
            id=0,  # the worker's client gives one
            prompt=prompt,
            sampling=msgspec.structs.replace(request.sampling, seed=seed),
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens, max_tokens),
            stop_ids=sorted(ends),
            n=request.n,
            logprobs=request.logprobs,
            priority=request.priority,
            client=client,
            salt=request.cache_salt,
            retention=request.retention,
            pin=request.pin_prompt,
            speculation=request.speculation,
        )

    def _check_ids(self, field: str, ids: Sequence[int] | dict[int, float]) -> None:
        size = self.model.tokenizer.vocab_size
        wrong = next((token for token in ids if token >= size), None)
        if wrong is not None:
            raise BadField(field, f"token id {wrong} in `{field}` is not in the vocabulary of {size} tokens")

    def _summary(self) -> Summary:
        """The engine's numbers where it gave them, else what was seen from here. Cached is what the first choice found."""
        first = self._first or time.perf_counter()
        last = max(self._last, first)
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        return Summary(
            prompt_tokens=len(self._prompt.ids),
            cached_tokens=min((usage.cached_tokens for usage in usages), default=0),
            output_tokens=sum(choice.tokens for choice in self._choices),
            drafted_tokens=sum(usage.drafted_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
            queue_ms=min((usage.queue_ms for usage in usages), default=0.0),
            prompt_ms=min((usage.prefill_ms for usage in usages), default=(first - self._submitted) * 1e3),
            predicted_ms=max((usage.decode_ms for usage in usages), default=(last - first) * 1e3),
            ttft_ms=(first - self._arrival.at) * 1e3,
            load_ms=self._arrival.load_ms,
            total_ms=_ms_since(self._arrival.at),
        )


class _Choice:
    """One sequence's way from tokens to text that is certain."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: NativeRequest) -> None:
        self.index = index
        self.tokens = 0
        self.usage: SequenceUsage | None = None
        self.finished = False
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(request.stop, request.include_stop)
        self._scored = request.logprobs is not None
        self._pending: list[TokenText] = []  # tokens whose text is still held back

    def push(self, output: SequenceOutput) -> Iterator[Delta | Finished]:
        if output.finish in ("error", "abort"):
            raise _failure(output)
        for token in output.tokens:
            self.tokens += 1
            if token.id == output.stop_id and token is output.tokens[-1]:
                break
            yield from self._push_token(token)
            if self.stopped is not None:
                yield self._finish("stop")
                return
        if output.finish is not None:
            yield from self._flush()
            yield self._finish("stop" if output.finish == "stop" or self.stopped is not None else "length")

    def _push_token(self, token: TokenOutput) -> Iterator[Delta]:
        if self._scored:
            self._pending.append(self._token_text(token))
        yield from self._match(self._detokenizer.push(token.id))

    def _flush(self) -> Iterator[Delta]:
        """The end of the sequence settles what was held back: half a character, half a stop string."""
        yield from self._match(self._detokenizer.flush())
        if self.stopped is None:
            yield from self._delta(self._matcher.flush().text)

    def _match(self, text: str) -> Iterator[Delta]:
        if text:
            result = self._matcher.push(text)
            self.stopped = result.stopped
            yield from self._delta(result.text)

    def _delta(self, text: str) -> Iterator[Delta]:
        if text:
            tokens, self._pending = tuple(self._pending), []
            yield Delta(self.index, text, tokens)

    def _finish(self, reason: Literal["stop", "length"]) -> Finished:
        self.finished = True
        return Finished(self.index, reason, self.stopped)

    def _token_text(self, token: TokenOutput) -> TokenText:
        bytes_of = self._tokenizer.token_bytes
        top = tuple((bytes_of(other), logprob) for other, logprob in token.top)
        return TokenText(bytes_of(token.id), token.logprob if token.logprob is not None else 0.0, top)


def _log_finished(model: str, summary: Summary) -> None:
    """One line a request; never what was said."""
    prompt, cached, output = summary.prompt_tokens, summary.cached_tokens, summary.output_tokens
    first, total = summary.ttft_ms, summary.total_ms
    log.info(
        "%s: %d tokens read (%d cached), %d written, first after %.0f ms, all in %.0f ms",
        model,
        prompt,
        cached,
        output,
        first,
        total,
    )


def _failure(output: SequenceOutput) -> CavectlError:
    if output.error is not None:
        return CavectlError.from_info(output.error)
    if output.finish == "abort":
        return CavectlError("the request was cancelled", code="cancelled")
    return CavectlError("a step of the engine failed for this request", code="engine_error")


def _client(peer: PeerInfo) -> str:
    """Whom the engine is fair to: the key's owner, else the user on this machine, else the address."""
    if peer.key:
        return f"key:{peer.key}"
    return f"{peer.kind}:{peer.uid if peer.kind == 'unix' else peer.address}"


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
