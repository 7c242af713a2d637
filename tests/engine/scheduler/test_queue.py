"""The waiting queue keeps the order of arrival, whoever comes back in between."""

from __future__ import annotations

import random

from engine.cache.blocks import BlockTable
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import Sequence
from engine.types import EngineRequest


def _sequence(number: int) -> Sequence:
    request = EngineRequest(id=number, prompt=[1], max_tokens=1)
    return Sequence(number, request, 0, 1, BlockTable([[]], [0]), 0.0)


def test_order_of_arrival_survives_any_order_of_calls() -> None:
    rng = random.Random(7)
    queue, expected = WaitingQueue(), set()
    sequences = [_sequence(i) for i in range(30)]
    for _ in range(500):
        sequence = rng.choice(sequences)
        if sequence in expected:
            queue.remove(sequence)
            expected.remove(sequence)
        else:
            queue.push(sequence)
            expected.add(sequence)
        assert list(queue) == sorted(expected, key=lambda s: s.id)
        assert len(queue) == len(expected)
        assert queue.first() is min(expected, key=lambda s: s.id, default=None)
