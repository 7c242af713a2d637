"""Sequences that wait for their first or next turn, in the order of their arrival.

A preempted sequence comes back with its old place. Whose turn it is among them is the policy's business.
Invariant: a sequence is in the queue at most once.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.scheduler.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot, oldest first: the queue may change meanwhile."""
        return iter(sorted(self._sequences.values(), key=lambda sequence: sequence.id))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._sequences

    def push(self, sequence: Sequence) -> None:
        assert sequence.id not in self._sequences, "the sequence waits already"
        self._sequences[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out. It must be in the queue."""
        assert self._sequences.get(sequence.id) is sequence, "the sequence does not wait"
        del self._sequences[sequence.id]
