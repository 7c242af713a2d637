"""Sequences that wait for their first or next turn, oldest first.

A preempted sequence comes back with its old place: it is older than whoever waits behind it.
Invariant: iteration is in order of arrival, and a sequence is in the queue at most once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.scheduler.sequence import Sequence


def _order(sequence: Sequence) -> int:
    return sequence.id


class WaitingQueue:
    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out. It must be in the queue."""
        index = bisect_left(self._sequences, sequence.id, key=_order)
        assert self._sequences[index] is sequence, "the sequence does not wait"
        del self._sequences[index]
