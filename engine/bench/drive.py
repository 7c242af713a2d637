"""Drives an engine in process as its worker does, and notes what each caller would have seen and when.

A token's time is the end of the step that brought it: the worker writes it out at that moment. Chores (`Engine.tick`) run between
steps and count, as in the product. Invariant: nothing is dropped: every output of every step lands in its stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.bench import timing
from engine.engine import Engine
from engine.types import EngineRequest, FinishReason, Priority, SamplingParams, SequenceUsage, StepResult

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, eq=False)
class Stream:
    """One request as its caller sees it. Times in seconds of the drive's clock."""

    request: EngineRequest
    arrived: float
    times: list[float] = field(default_factory=list)  # of each token
    finish: FinishReason | None = None
    usage: SequenceUsage | None = None

    @property
    def first_token_ms(self) -> float:
        return (self.times[0] - self.arrived) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Between each token and the one before it."""
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: when it ended, how long it took with its chores, and what it computed."""

    ended: float
    ms: float
    prefill_tokens: int
    decode_tokens: int


class Drive:
    def __init__(self, engine: Engine, clock: Callable[[], float] = timing.seconds) -> None:
        """`clock` must be the engine's own."""
        self.engine = engine
        self.streams: dict[int, Stream] = {}
        self.steps: list[StepTime] = []
        self.live = 0  # requests that have not ended
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: Priority = "normal",
        client: str = "",
        sampling: SamplingParams = GREEDY,
    ) -> Stream:
        """A request that arrives now and ends by length only."""
        number = len(self.streams)
        request = EngineRequest(
            id=number, prompt=prompt, max_tokens=max_tokens, sampling=sampling, priority=priority, client=client
        )
        stream = self.streams[number] = Stream(request, self._clock())
        self.engine.add(request, stream.arrived)
        self.live += 1
        return stream

    def step(self) -> StepTime | None:
        """One step; None when nothing is left to do. Raises RuntimeError when a request failed: then nothing counts."""
        started = self._clock()
        self.engine.tick(started)
        result = self.engine.step()
        if result is None:
            return None
        ended = self._clock()
        self._take(result, ended)
        stats = result.stats
        step = StepTime(ended, (ended - started) * 1e3, stats.prefill_tokens, stats.decode_tokens)
        self.steps.append(step)
        return step

    def finish(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def until_tokens(self, stream: Stream, count: int) -> None:
        """Step until `stream` has `count` tokens. Raises RuntimeError when it ends before."""
        while len(stream.times) < count:
            if stream.finish or not self.step():
                raise RuntimeError(f"a stream ended after {len(stream.times)} tokens, {count} were to be measured")

    def stop(self, *streams: Stream) -> None:
        """Abort what has not ended, and finish."""
        for stream in streams:
            self.engine.abort(stream.request.id)
        self.finish()

    def _take(self, result: StepResult, now: float) -> None:
        for output in result.outputs:
            stream = self.streams[output.request]
            stream.times += [now] * len(output.tokens)
            if output.finish:
                stream.finish, stream.usage = output.finish, output.usage
                self.live -= 1
            if output.error:
                raise RuntimeError(f"a request of the benchmark failed: {output.error.message}")
