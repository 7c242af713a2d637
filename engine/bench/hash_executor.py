"""An executor without a model: tokens by hash, time by a formula on a clock of its own. For what depends on scheduling alone.

Invariant: a sequence's tokens depend on its prompt and their number only, so they are the same after any preemption.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from engine.runtime.batch import Row, RowOutput, SamplingSlot, StepInputs, StepOutputs
from engine.types import TokenOutput

_MIX = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads consecutive numbers over all 64 bits
_MASK = (1 << 64) - 1


class VirtualClock:
    """Monotonic seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class HashExecutor:
    """Implements engine.runtime.executor.Executor. A step takes `step_ms`, and `token_ms` for each of its tokens."""

    depth = 1

    def __init__(self, clock: VirtualClock, *, step_ms: float, token_ms: float, vocab_size: int) -> None:
        self._clock, self._step_ms, self._token_ms, self._vocab_size = clock, step_ms, token_ms, vocab_size
        self._slots: dict[int, tuple[int, int]] = {}  # digest of the prompt, tokens drawn

    def submit(self, inputs: StepInputs) -> StepOutputs:
        for slot in inputs.closed:
            self._slots.pop(slot, None)
        self._slots |= {slot.slot: (_digest(slot), len(slot.output)) for slot in inputs.opened}
        self._clock.advance((self._step_ms + self._token_ms * sum(len(row.tokens) for row in inputs.rows)) / 1e3)
        return StepOutputs(step=inputs.step, rows=[self._row(row) for row in inputs.rows])

    def collect(self, ticket: StepOutputs) -> StepOutputs:
        return ticket

    def grow(self, pages: Sequence[int], held: Sequence[Sequence[int]]) -> None:
        """There are no pages."""

    def close(self) -> None:
        """Nothing is held."""

    def _row(self, row: Row) -> RowOutput:
        if row.sampling < 0:
            return RowOutput()
        digest, drawn = self._slots[row.sampling]
        self._slots[row.sampling] = digest, drawn + 1
        return RowOutput(tokens=[TokenOutput(((digest + drawn) * _MIX & _MASK) % self._vocab_size)])


def _digest(slot: SamplingSlot) -> int:
    return zlib.crc32(array("i", slot.prompt).tobytes())
