"""Shares of clients and bounds of waiting, over random mixes on a machine that exists only as a formula."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.plan import Plan
from tests.engine.scheduler.simulation import Simulation, make_scheduler, make_sequence

AGING_S = 5.0


def _step_ms(plan: Plan) -> float:
    return 10.0 + sum(0.5 if row.decode else 0.25 * row.count for row in plan.rows)


def _machine(*, sequences: int = 8, aging_s: float = 1e9) -> Simulation:
    return Simulation(make_scheduler(400, budget=64, sequences=sequences, aging_s=aging_s, target_ms=40.0), _step_ms)


@settings(deadline=None, max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 200), st.integers(1, 40)), min_size=2, max_size=5),
    seed=st.integers(0, 1 << 30),
)
def test_clients_that_always_want_more_get_equal_shares(shapes: list[tuple[int, int, int]], seed: int) -> None:
    """Clients differ in how many requests they keep in the queue, in prompts and in answers; shares are within 20%."""
    run, chance, ids = _machine(sequences=4), random.Random(seed), itertools.count()
    at_once = {f"client {i}": 4 + extra for i, (extra, _, _) in enumerate(shapes)}

    def fill() -> None:
        for index, (client, count) in enumerate(at_once.items()):
            _, prompt, limit = shapes[index]
            present = sum(s.request.client == client for s in run.lines.values())
            for _ in range(count - present):
                number = next(ids)
                run.add(
                    make_sequence(number, max(1, int(prompt * chance.uniform(0.5, 1.5))), limit, client=client, arrived=run.now)
                )

    before: Counter[str] = Counter()
    while run.now < 60.0:
        fill()
        run.step()
        if run.now < 20.0:
            before = Counter(run.served)
    shares = [run.served[client] - before[client] for client in at_once]
    fair = sum(shares) / len(shares)
    assert all(abs(share - fair) <= 0.2 * fair for share in shares), shares


@settings(deadline=None, max_examples=25)
@given(
    load=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["high", "normal"]), st.integers(1, 60)), min_size=3, max_size=6
    ),
    waiting=st.sampled_from(["low", "normal"]),
)
def test_nobody_waits_for_ever(load: list[tuple[str, str, int]], waiting: str) -> None:
    """Others never stop coming; a request of the least class starts after two promotions and the fairness window at most."""
    run, ids = _machine(sequences=3, aging_s=AGING_S), itertools.count(1)
    run.add(make_sequence(0, 30, 20, client="patient", priority=waiting))  # pyright: ignore[reportArgumentType]

    def fill() -> None:
        for client, priority, prompt in load:
            same = sum((s.request.client, s.request.priority) == (client, priority) for s in run.lines.values())
            for _ in range(6 - same):
                run.add(make_sequence(next(ids), prompt, 30, client=client, priority=priority, arrived=run.now))  # pyright: ignore[reportArgumentType]

    while 0 in run.lines:
        fill()
        run.step()
        assert run.now < 2 * AGING_S + 30.0, "still not through"
    assert run.started[0] <= 2 * AGING_S + 10.0


def test_a_high_stream_is_as_quick_among_low_ones_as_alone() -> None:
    alone, crowded = _machine(), _machine()
    for number in range(1, 9):
        crowded.add(make_sequence(number, 150, 400, client="batch", priority="low"))
    for run in (alone, crowded):
        for _ in range(30):
            run.step()
        run.add(make_sequence(0, 40, 50, client="person", priority="high", arrived=run.now))
    waits = []
    for run in (alone, crowded):
        start = run.now
        while 0 in run.lines:
            run.step()
        waits.append(run.now - start)
    assert waits[1] <= 1.5 * waits[0] + 0.05


def test_a_flood_of_one_client_does_not_delay_another() -> None:
    run = _machine(sequences=4)
    for number in range(1, 101):
        run.add(make_sequence(number, 100, 50, client="flood"))
    for _ in range(50):
        run.step()
    run.add(make_sequence(0, 20, 5, client="quiet", arrived=run.now))
    start, ahead = run.now, len(run.ended)
    while 0 in run.lines:
        run.step()
    assert len(run.ended) - ahead <= 5, "it took the next slot that was free"
    assert run.now - start < 3.0
