"""Turns: class before fairness before age, service that is forgotten, promotion by waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.radix import Namespace
from engine.scheduler.policy import WINDOW_S, Policy, rank, seniority
from engine.scheduler.sequence import Sequence
from engine.types import EngineRequest, Priority

PRIORITIES: list[Priority] = ["high", "normal", "low"]


def _sequence(number: int, client: str = "", priority: Priority = "normal", arrived: float = 0.0) -> Sequence:
    request = EngineRequest(id=number, prompt=[1], max_tokens=1, client=client, priority=priority)
    return Sequence(number, request, 0, 1, Namespace(), arrived)


@given(
    people=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(PRIORITIES)), max_size=20),
    served=st.dictionaries(st.sampled_from("abc"), st.integers(0, 500)),
    gift=st.integers(0, 300),
)
def test_each_turn_goes_to_the_best_of_those_left(people: list[tuple[str, Priority]], served: dict[str, int], gift: int) -> None:
    policy = Policy(aging_s=30.0)
    for client, tokens in served.items():
        policy.charge(client, tokens, 0.0)
    left = [_sequence(number, client, priority) for number, (client, priority) in enumerate(people)]
    given_: dict[tuple[int, str], int] = {}
    turns = policy.turns(left, 1.0)
    for sequence in turns:
        best = min(left, key=lambda s: (rank(s), _account(s, served, given_), _oldest(s, left)))
        assert (rank(sequence), sequence.request.client, sequence.id) == (rank(best), best.request.client, best.id)
        left.remove(sequence)
        turns.gave(gift)
        key = (rank(sequence), sequence.request.client)
        given_[key] = given_.get(key, 0) + gift
    assert not left


def _account(sequence: Sequence, served: dict[str, int], given_: dict[tuple[int, str], int]) -> int:
    client = sequence.request.client
    return served.get(client, 0) + given_.get((rank(sequence), client), 0)


def _oldest(sequence: Sequence, left: list[Sequence]) -> tuple[int, int]:
    """Among clients served alike, the one whose first in line is older; within a client, the older."""
    line = [s.id for s in left if s.request.client == sequence.request.client and rank(s) == rank(sequence)]
    return min(line), sequence.id


@given(services=st.lists(st.tuples(st.floats(0, 3, allow_nan=False), st.integers(1, 100)), max_size=40))
def test_service_is_forgotten_after_the_window(services: list[tuple[float, int]]) -> None:
    policy, now, all_ = Policy(aging_s=30.0), 0.0, []
    for wait, tokens in services:
        now += wait
        policy.charge("a", tokens, now)
        all_.append((now, tokens))
    recent = sum(tokens for at, tokens in all_ if now - at <= WINDOW_S - 0.25)
    remembered = sum(tokens for at, tokens in all_ if now - at <= WINDOW_S + 0.25)
    assert recent <= policy.served("a", now) <= remembered
    assert policy.served("a", now + WINDOW_S + 0.5) == 0


def test_clients_that_were_not_served_of_late_leave_no_trace() -> None:
    policy = Policy(aging_s=30.0)
    for number in range(1000):
        policy.charge(f"client {number}", 5, float(number))
    assert len(policy._served) < 20


def test_waiting_wins_one_class_at_a_time_and_it_is_kept() -> None:
    policy, sequence = Policy(aging_s=30.0), _sequence(1, priority="low", arrived=100.0)
    seen = []
    for now in range(100, 240, 5):
        policy.age([sequence], float(now))
        seen.append(rank(sequence))
    assert [seen.index(2), seen.index(1), seen.index(0)] == [0, 6, 12]
    assert seen == sorted(seen, reverse=True)


def test_service_starts_the_waiting_anew() -> None:
    policy, sequence = Policy(aging_s=30.0), _sequence(1, priority="low")
    for now in range(0, 300, 20):
        policy.age([sequence], float(now))
        sequence.last_served = float(now)
    assert rank(sequence) == 2


def test_the_low_and_the_young_give_way_first() -> None:
    sequences = [
        _sequence(1, priority="low"),
        _sequence(2),
        _sequence(3, priority="high"),
        _sequence(4),
        _sequence(5, priority="low"),
    ]
    assert [s.id for s in sorted(sequences, key=seniority)] == [3, 2, 4, 1, 5]
