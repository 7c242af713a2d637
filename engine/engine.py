"""The step loop: requests in, tokens out. Owns stop rules, finish reasons, accounts and what happens when a step fails.

The scheduler decides what a step computes and the executor computes it; several steps may be in flight (`executor.depth`), so a
sequence may be found finished one step late: what the later step brings for it is dropped.
A step that raises is undone and its rows are tried again in halves, so that only the rows that raise by themselves fail; when every
row does, it is not one request's fault and the engine gives up with EngineFailure.
Invariant (`check`, callable after every step): pages, slots and queues add up, and a sequence that ended holds nothing.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.admission import admit
from engine.audit import Audit
from engine.built import DEFAULT_OPTIONS, EngineFailure, EngineOptions
from engine.cache.blocks import pages_for
from engine.cache.layout import CacheLayout
from engine.cache.manager import CacheManager
from engine.cache.radix import Namespace
from engine.errors import ErrorInfo, InvalidRequest
from engine.outcomes import blame, halves, take
from engine.runtime.batch import RowOutput
from engine.runtime.executor import Executor, Ticket
from engine.scheduler.pacing import Pacing
from engine.scheduler.plan import Plan, PlannedRow
from engine.scheduler.policy import Policy
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    SequenceOutput,
    SequenceUsage,
    StepResult,
    TokenOutput,
)

log = logging.getLogger(__name__)

FRUITLESS_STEPS = 3  # so many steps in a row without one good row, and the engine is broken rather than its requests


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way: the executor's ticket, or what `submit` raised."""

    plan: Plan
    ticket: Ticket = None
    error: Exception | None = None


class Engine:
    def __init__(
        self,
        executor: Executor,
        layout: CacheLayout,
        pages: Seq[int],
        *,
        context_tokens: int,
        max_step_tokens: int = 512,
        max_sequences: int = 64,
        options: EngineOptions = DEFAULT_OPTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages` has one count for each group of `layout`, the same as the executor allocated.

        `on_scheduled` hears of requests that a step is the first to touch, before the step begins.
        """
        self.executor = executor
        self.on_scheduled: Callable[[list[int]], object] = _nobody
        self._options = options
        self._cache = _cache(layout, pages, options)
        self._scheduler = Scheduler(
            self._cache,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            policy=Policy(aging_s=options.aging_s),
            pacing=Pacing(target_ms=options.target_step_ms, max_step_tokens=max_step_tokens),
            speculation=options.speculation,
        )
        self._audit = Audit(self.check, options.accounting_interval_s)
        self._context_tokens = context_tokens
        self._clock = clock
        self._live: dict[int, list[Sequence]] = {}  # request -> its sequences that have not ended
        self._begun: set[int] = set()  # those of them that a step has touched
        self._flights: deque[_Flight] = deque()
        self._outbox: list[SequenceOutput] = []  # ends that came between steps
        self._ids = itertools.count()
        self._step = 0  # last step submitted
        self._fruitless = 0
        self._stats = self._measure(0.0, None)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._outbox or self._flights)

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def add(self, request: EngineRequest, arrived: float | None = None) -> None:
        """Queue `request`; `arrived` is when it came, by the engine's clock. Raises what engine/admission.py refuses it with."""
        limit = self._admit(request)
        at = self._clock() if arrived is None else arrived
        options = self._options
        namespace = Namespace(options.model, options.format, request.adapter, request.salt)
        sequences = [
            Sequence(next(self._ids), request, choice, limit, namespace, at, tokens=list(request.prompt))
            for choice in range(request.n)
        ]
        self._live[request.id] = sequences
        for sequence in sequences:
            self._scheduler.add(sequence)

    def refuse(self, request: EngineRequest, error: ErrorInfo) -> None:
        """Report every choice of a request that `add` did not take as failed, with the next step."""
        usage = SequenceUsage(
            prompt_tokens=len(request.prompt), cached_tokens=0, output_tokens=0, queue_ms=0.0, prefill_ms=0.0, decode_ms=0.0
        )
        self._outbox += [
            SequenceOutput(request=request.id, choice=choice, finish="error", error=error, usage=usage)
            for choice in range(max(1, request.n))
        ]

    def abort(self, request: int, choice: int | None = None) -> None:
        """End a request, or one choice of it, wherever it is; its pages are free on return. Unknown ones have ended already."""
        for sequence in [s for s in self._live.get(request, ()) if choice is None or s.choice == choice]:
            self._outbox.append(self._end(sequence, "abort"))

    def step(self) -> StepResult | None:
        """Run one step and say what it brought; None when there is nothing to do. Raises EngineFailure."""
        if not self.has_work:
            return None
        started = self._clock()
        outputs, self._outbox = self._outbox, []
        plan = None
        try:
            self._submit()
            if self._flights:
                flight = self._flights.popleft()
                plan = flight.plan
                outputs += self._settle(flight)
            elif self._live:
                raise AssertionError("sequences wait and none can run")
        except Exception as error:
            log.exception("the step failed and no request can be blamed")
            raise self._give_up(outputs, started) from error
        seconds = self._clock() - started
        if plan:
            self._scheduler.observe(plan, seconds * 1e3)
            self._audit.changed()
        self._stats = self._measure(seconds, plan)
        return StepResult(outputs, self._stats)

    def tick(self, now: float) -> float | None:
        """What is due without a step: prefixes too old, the accounts. Seconds until the next time; None: nothing waits for it.

        A wrong account is logged and counted in the stats, never raised.
        """
        cached = self._cache.cached_pages
        expiry = self._cache.expire(now)
        audit = self._audit.tick(now, idle=not self.has_work)
        if cached != self._cache.cached_pages or self._stats.accounting_errors != self._audit.errors:
            self._stats = self._measure(0.0, None)
        return min((max(0.0, due - now) for due in (expiry, audit) if due is not None), default=None)

    def grow(self, context_tokens: int, pages: Seq[int]) -> None:
        """Have `pages` pages of each group, and sequences of up to `context_tokens`. Steps in flight are finished first.

        Raises what the executor raises when there is no memory; then all is as it was.
        """
        while self._flights:
            self._outbox += self._settle(self._flights.popleft())
        self.executor.grow(pages, self._cache.held())
        self._cache.grow(pages)
        self._context_tokens = context_tokens
        self._stats = self._measure(0.0, None)

    def held_pages(self) -> list[int]:
        """Of each group, how many pages hold something."""
        return [len(pages) for pages in self._cache.held()]

    def cache_filled(self) -> tuple[int, int]:
        """(slots that hold a computed token, slots) of all pages in use or cached."""
        return self._cache.filled()

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and queues add up."""
        self._scheduler.check()
        known = {sequence.id for sequences in self._live.values() for sequence in sequences}
        placed = {*self._scheduler.running, *(sequence.id for sequence in self._scheduler.waiting)}
        assert known == placed, f"sequences known but not scheduled, or the reverse: {sorted(known ^ placed)}"

    # --- admission -----------------------------------------------------------------------------------------------------------

    def _admit(self, request: EngineRequest) -> int:
        """Output tokens that `request` may have at most."""
        if request.id in self._live:
            raise InvalidRequest(f"request {request.id} is running already")
        return admit(request, self._cache, self._context_tokens, self._promised_pages())

    def _promised_pages(self) -> int:
        """Pages that live requests will have pinned at most."""
        return sum(pages_for(len(s[0].request.prompt)) for s in self._live.values() if s[0].request.pin)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Keep as many steps in flight as the executor takes. After one that failed at once, the others must settle first."""
        while len(self._flights) < self.executor.depth and not (self._flights and self._flights[-1].error):
            plan = self._scheduler.schedule(self._step + 1, self._clock())
            if plan is None:
                return
            self._step += 1
            if first := [request for request in plan.first_of if request not in self._begun]:
                self._begun.update(first)
                self.on_scheduled(first)
            try:
                self._flights.append(_Flight(plan, self.executor.submit(plan.inputs)))
            except Exception as error:
                self._flights.append(_Flight(plan, error=error))

    def _settle(self, flight: _Flight) -> list[SequenceOutput]:
        """Collect a step and hand out what it brought; after a failure, find whose fault it is."""
        try:
            if flight.error:
                raise flight.error
            results = self._collect(flight)
        except Exception as error:
            log.warning("step %d failed, trying its rows apart", flight.plan.inputs.step, exc_info=error)
            return self._retry(flight.plan, error)
        self._fruitless = 0
        return self._accept(flight.plan.rows, results)

    def _collect(self, flight: _Flight) -> list[RowOutput]:
        outputs = self.executor.collect(flight.ticket)
        if outputs.step != flight.plan.inputs.step or len(outputs.rows) != len(flight.plan.rows):
            raise RuntimeError("the executor answered another step than the one collected")
        return outputs.rows

    def _accept(self, rows: list[PlannedRow], results: list[RowOutput]) -> list[SequenceOutput]:
        outputs = [self._apply(row, result) for row, result in zip(rows, results, strict=True) if row.live]
        return [output for output in outputs if output is not None]

    def _apply(self, row: PlannedRow, result: RowOutput) -> SequenceOutput | None:
        """What a row that was computed gives its sequence; None for a chunk in mid-prompt."""
        sequence = row.sequence
        if result.error or (row.draws and not result.tokens):
            return self._end(sequence, "error", error=ErrorInfo("engine_error", result.error or "the model gave no token"))
        now = self._clock()
        taken, finish = take(sequence, result.tokens)
        self._scheduler.confirm(row, now, min(len(taken), max(0, len(result.tokens) - 1)))
        if not row.draws:
            return None
        if row.draft and self._options.speculation:
            self._options.speculation.settled(sequence.id, row.draft, row.draft.path([token.id for token in result.tokens]))
            sequence.drafted_tokens += len(row.draft)
            sequence.accepted_tokens += len(result.tokens) - 1
        sequence.last_token = now
        if sequence.first_token is None:
            sequence.first_token = sequence.last_token
        if finish is not None:
            return self._end(sequence, finish, tokens=taken, stop_id=taken[-1].id if finish == "stop" else None)
        return SequenceOutput(request=sequence.request.id, choice=sequence.choice, tokens=taken)

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        *,
        tokens: list[TokenOutput] | None = None,
        stop_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> SequenceOutput:
        """Take `sequence` out of everything and give its last output."""
        self._scheduler.remove(sequence, self._clock(), failed=finish == "error")
        if self._options.speculation:
            self._options.speculation.forget(sequence.id)
        siblings = self._live[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request.id]
            self._begun.discard(sequence.request.id)
        return SequenceOutput(
            request=sequence.request.id,
            choice=sequence.choice,
            tokens=tokens or [],
            finish=finish,
            stop_id=stop_id,
            error=error,
            usage=sequence.usage(self._clock()),
        )

    # --- failures ------------------------------------------------------------------------------------------------------------

    def _retry(self, plan: Plan, error: Exception) -> list[SequenceOutput]:
        """Undo `plan` and every later step, then run its rows in halves of halves until only those that raise alone are left."""
        later = list(self._flights)
        self._flights.clear()
        for flight in later:
            self._drain(flight)
        rows = self._scheduler.rewind(plan)
        for flight in later:
            self._scheduler.rewind(flight.plan)
        outputs: list[SequenceOutput] = []
        failed: list[tuple[PlannedRow, Exception]] = []
        pieces = halves(rows)
        while pieces:
            piece = pieces.pop(0)
            attempt = self._attempt(piece)
            if not isinstance(attempt, Exception):
                outputs += self._accept(piece, attempt)
            elif len(piece) == 1:
                failed.append((piece[0], attempt))
            else:
                pieces = halves(piece) + pieces
        self._judge(len(failed), len(rows), error)
        outputs += [self._end(row.sequence, "error", error=blame(cause)) for row, cause in failed]
        return outputs

    def _attempt(self, rows: list[PlannedRow]) -> list[RowOutput] | Exception:
        """Run `rows` as a step of their own. After an exception, which is returned, it is as if they had not run."""
        self._step += 1
        plan = self._scheduler.dispatch(self._step, rows)
        try:
            return self._collect(_Flight(plan, self.executor.submit(plan.inputs)))
        except Exception as error:
            self._scheduler.rewind(plan)
            return error

    def _drain(self, flight: _Flight) -> None:
        """Collect a step whose outcome no longer matters."""
        if flight.error is None:
            try:
                self.executor.collect(flight.ticket)
            except Exception:
                log.warning("step %d failed after the one before it", flight.plan.inputs.step)

    def _judge(self, failed: int, tried: int, error: Exception) -> None:
        """Raise `error` when it cannot be any single request's fault."""
        self._fruitless = self._fruitless + 1 if failed == tried and tried else 0
        if failed == tried > 1 or self._fruitless >= FRUITLESS_STEPS:
            raise error

    def _give_up(self, outputs: list[SequenceOutput], started: float) -> EngineFailure:
        info = ErrorInfo("engine_error", "the engine failed during this request", "try again")
        outputs += [self._end(sequence, "error", error=info) for sequence in list(self._scheduler.running.values())]
        return EngineFailure(StepResult(outputs, self._measure(self._clock() - started, None)))

    def _measure(self, seconds: float, plan: Plan | None) -> EngineStats:
        counts = self._options.speculation.counts if self._options.speculation else None
        return EngineStats(
            step=self._step,
            step_ms=seconds * 1e3,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            prefill_tokens=plan.prefill_tokens if plan else 0,
            decode_tokens=plan.decode_tokens if plan else 0,
            pages_total=self._cache.total_pages,
            pages_used=self._cache.used_pages,
            pages_cached=self._cache.cached_pages,
            pages_pinned=self._cache.pinned_pages,
            chunk_tokens=self._scheduler.pacing.chunk_tokens,
            preemptions=self._scheduler.preemptions,
            evicted_pages=self._cache.evicted_pages,
            hit_tokens=self._scheduler.hit_tokens,
            accounting_errors=self._audit.errors,
            drafted_tokens=counts.drafted if counts else 0,
            accepted_tokens=counts.accepted if counts else 0,
        )


def _cache(layout: CacheLayout, pages: Seq[int], options: EngineOptions) -> CacheManager:
    return CacheManager(
        layout,
        pages,
        sharing=options.prefix_cache,
        chat_retention_s=options.chat_retention_s,
        rest_retention_s=options.rest_retention_s,
    )


def _nobody(requests: list[int]) -> None:
    """Hears of scheduled requests where nobody wants to."""
