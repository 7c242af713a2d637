"""Order of arrival, whatever the order of pushing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.radix import Namespace
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import Sequence
from engine.types import EngineRequest


def _sequence(number: int) -> Sequence:
    return Sequence(number, EngineRequest(id=number, prompt=[1], max_tokens=1), 0, 1, Namespace(), 0.0)


@given(numbers=st.lists(st.integers(0, 1000), unique=True, max_size=30), gone=st.sets(st.integers(0, 29)))
def test_iteration_is_by_age_and_removal_takes_the_very_one(numbers: list[int], gone: set[int]) -> None:
    queue = WaitingQueue()
    sequences = [_sequence(number) for number in numbers]
    for sequence in sequences:
        queue.push(sequence)
    left = []
    for index, sequence in enumerate(sequences):
        if index in gone:
            queue.remove(sequence)
        else:
            left.append(sequence)
        assert (sequence in queue) == (index not in gone)
    assert list(queue) == sorted(left, key=lambda sequence: sequence.id)
    assert len(queue) == len(left)


def test_nobody_waits_twice_and_a_stranger_is_not_removed() -> None:
    queue = WaitingQueue()
    queue.push(sequence := _sequence(3))
    with pytest.raises(AssertionError):
        queue.push(sequence)
    with pytest.raises(AssertionError):
        queue.remove(_sequence(3))
