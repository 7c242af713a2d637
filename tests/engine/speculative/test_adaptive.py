"""What is drafted, from invented costs and chances: as much as pays, nothing where it loses, and again when it would win."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.speculative.acceptance import Acceptance
from engine.speculative.adaptive import LEAST_GAIN, PROBE_EVERY, Speculation, Wish
from engine.speculative.cost import StepCosts
from engine.speculative.tree import DraftTree, Limits

LIMITS = Limits(nodes=12, depth=12, branches=3)


def chain(length: int, confidence: int = 8) -> DraftTree:
    return DraftTree(list(range(length)), list(range(-1, length - 1)), [confidence] * length)


class Always:
    """Drafts chains as long as it may."""

    name = "always"

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def propose(self, sequence: int, tokens: Sequence[int], limits: Limits) -> DraftTree:
        return chain(min(limits.nodes, limits.depth))

    def forget(self, sequence: int) -> None:
        self.forgotten.append(sequence)


def play(
    speculation: Speculation, chance: float, slope: float, steps: int, *, sequences: int = 1, seed: int = 0
) -> tuple[float, float]:
    """(tokens, time) of so many steps where one over n tokens takes 1 + slope * (n - 1), each node right by `chance`."""
    rolls, tokens, spent = random.Random(seed), 0.0, 0.0
    for _ in range(steps):
        wishes = [Wish(number, [0], 12) for number in range(sequences)]
        trees = speculation.plan(wishes, sequences, sequences, 200)
        for number, tree in trees.items():
            right = 0
            while right < len(tree) and rolls.random() < chance:
                right += 1
            speculation.settled(number, tree, list(range(right)))
            tokens += right
        rows = sequences + sum(map(len, trees.values()))
        time = 1 + slope * (rows - 1)
        speculation.observe(rows, time * rolls.uniform(0.9, 1.1))
        tokens, spent = tokens + sequences, spent + time
    return tokens, spent


@pytest.mark.parametrize("slope", [0.03, 0.2, 0.5])
@pytest.mark.parametrize("sequences", [1, 4])
def test_it_never_costs_more_than_three_percent_where_nothing_is_right(slope: float, sequences: int) -> None:
    speculation = Speculation(Always(), LIMITS)
    play(speculation, 0.0, slope, 100, sequences=sequences)  # it learns
    tokens, spent = play(speculation, 0.0, slope, 2000, sequences=sequences)
    assert tokens == 2000 * sequences
    assert spent / (2000 * (1 + slope * (sequences - 1))) < 1.03


@pytest.mark.parametrize(("chance", "slope", "least"), [(0.9, 0.03, 3.5), (0.9, 0.2, 1.5), (0.7, 0.05, 1.9), (1.0, 0.1, 5.5)])
def test_it_gains_where_there_is_something_to_gain(chance: float, slope: float, least: float) -> None:
    speculation = Speculation(Always(), LIMITS)
    play(speculation, chance, slope, 100)
    tokens, spent = play(speculation, chance, slope, 1000)
    best = max(sum(chance**k for k in range(n + 1)) / (1 + slope * n) for n in range(13))
    assert tokens / spent > max(least, 0.85 * best)


def test_it_begins_again_when_drafts_become_right() -> None:
    speculation = Speculation(Always(), LIMITS)
    play(speculation, 0.0, 0.1, 400)
    assert not speculation.plan([Wish(0, [0], 12)], 1, 1, 200) or PROBE_EVERY < 2
    tokens, spent = play(speculation, 0.95, 0.1, 20 * PROBE_EVERY)
    assert tokens / spent > 1.5


def test_rooms_are_kept() -> None:
    speculation = Speculation(Always(), LIMITS)
    wishes = [Wish(0, [0], 2), Wish(1, [0], 0), Wish(2, [0], -1), Wish(3, [0], 50)]
    speculation.observe(4, 1.0)
    trees = speculation.plan(wishes, 4, 4, 5)
    assert len(trees[0]) <= 2 and not {1, 2} & trees.keys() and sum(map(len, trees.values())) <= 5
    assert speculation.plan(wishes, 4, 4, 0) == {}
    assert speculation.plan([], 0, 300, 10) == {}


def test_what_ended_is_forgotten() -> None:
    drafter = Always()
    speculation = Speculation(drafter, LIMITS)
    play(speculation, 0.5, 0.1, 10)
    speculation.forget(0)
    speculation.forget(7)
    assert drafter.forgotten == [0, 7] and not speculation._idle and not speculation._acceptance._own


# --- costs ------------------------------------------------------------------------------------------------------------------------


def test_costs_are_the_middle_of_what_was_measured() -> None:
    costs = StepCosts()
    for ms in (10.0, 10.0, 99.0, 10.0, 10.0):
        costs.observe(1, ms)
    assert costs.ratio(1, 3) == pytest.approx(1.45), "the prior, until there is another size"
    for ms in (20.0, 20.0, 200.0, 20.0):
        costs.observe(5, ms)
    assert costs.ratio(1, 4) == 2.0
    assert costs.ratio(1, 2) == pytest.approx(1.5), "between two sizes: along the slope"
    assert costs.ratio(1, 8) == pytest.approx(3.0)
    assert costs.ratio(5, 4) == pytest.approx(1.5)
    assert costs.ratio(5, 0) == 1.0


def test_costs_never_promise_something_for_nothing() -> None:
    costs = StepCosts()
    for _ in range(5):
        costs.observe(1, 10.0)
        costs.observe(4, 5.0)  # a machine that was busy
    assert costs.ratio(1, 3) == 1.0 and costs.ratio(1, 8) >= 1.0
    for tokens, ms in ((0, 1.0), (-1, 1.0), (100_000, 1.0)):
        costs.observe(tokens, ms)


# --- acceptance -------------------------------------------------------------------------------------------------------------------


def test_chances_follow_what_is_seen() -> None:
    acceptance = Acceptance()
    prior = acceptance.chance(0, 8)
    for _ in range(40):
        acceptance.learn(0, chain(3), [])
    assert acceptance.chance(0, 8) < 0.1 < prior, "the first node was tried and wrong"
    assert acceptance.chance(1, 8) < prior, "others learn from it, less"
    assert acceptance.chance(1, 8) > acceptance.chance(0, 8)
    assert acceptance.chance(0, 40) > 0.5, "other confidences do not"
    for _ in range(60):
        acceptance.learn(0, chain(3), [0, 1, 2])
    assert acceptance.chance(0, 8) > 0.8
    acceptance.forget(0)
    assert acceptance.chance(0, 8) == acceptance.chance(5, 8)


def test_expectations_multiply_along_a_path_and_share_at_a_fork() -> None:
    acceptance = Acceptance()
    a = acceptance.chance(0, 8)
    assert acceptance.expected(0, chain(3)) == pytest.approx([a, a**2, a**3])
    fork = DraftTree([1, 2, 3], [-1, -1, 1], [8, 8, 8])
    assert acceptance.expected(0, fork) == pytest.approx([a, (1 - a) * a, (1 - a) * a * a])
    many = DraftTree(list(range(30)), [-1] * 30, [40] * 30)
    assert sum(acceptance.expected(0, many)) <= 1 + 1e-9
    assert LEAST_GAIN > 1
