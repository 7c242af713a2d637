"""A step as planned: its rows, and the inputs made of them. Plain data of the scheduler and the step loop."""

from __future__ import annotations

from dataclasses import dataclass

from engine.runtime.batch import FROM_PREVIOUS, Row, StepInputs
from engine.scheduler.sequence import Sequence
from engine.speculative.tree import DraftTree


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """`count` new tokens of a sequence from `start` on, whether a draw follows them, and what is drafted to come then."""

    sequence: Sequence
    epoch: int
    start: int
    count: int
    draws: bool
    decode: bool  # the next token of a running answer, not part of a prompt or a recomputation
    draft: DraftTree | None = None

    @property
    def live(self) -> bool:
        """Whether the sequence still wants what this row brings."""
        return self.epoch == self.sequence.epoch


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows, the inputs made of them, and the requests that it is the first to touch."""

    rows: list[PlannedRow]
    inputs: StepInputs
    first_of: list[int]

    @property
    def decode_tokens(self) -> int:
        return sum(row.count for row in self.rows if row.decode)

    @property
    def drafted_tokens(self) -> int:
        return sum(len(row.draft) for row in self.rows if row.draft)

    @property
    def prefill_tokens(self) -> int:
        return sum(row.count for row in self.rows if not row.decode)


def row_of(row: PlannedRow) -> Row:
    """What an executor is told of it."""
    sequence = row.sequence
    assert sequence.lease is not None
    tokens = sequence.tokens[row.start : row.start + row.count] or [FROM_PREVIOUS]
    return Row(
        sequence=sequence.id,
        tokens=[*tokens, *row.draft.tokens] if row.draft else tokens,
        tree=row.draft.parents if row.draft else None,
        position=row.start,
        pages=[list(pages) for pages in sequence.lease.pages],
        sampling=sequence.slot if row.draws else -1,
    )
