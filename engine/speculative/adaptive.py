"""Decides what is drafted in a step: as much as pays, by what drafts were worth so far and what rows cost.

    expected tokens of the step / its expected time, over the tree's first n nodes: the best n, or none
Not here: finding drafts (a Drafter), checking them (verify.py, in an executor). Invariant: a sequence whose drafts do not pay
costs no more than a node now and then, by which it is noticed when they begin to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculative.acceptance import Acceptance
from engine.speculative.cost import StepCosts
from engine.speculative.drafter import Drafter
from engine.speculative.tree import DraftTree, Limits

LEAST_GAIN = 1.02  # a plan that promises less is not followed
PROBE_EVERY = 48  # steps of a sequence without a draft that are followed by one of a single node


@dataclass(slots=True)
class Counts:
    """Since the beginning: nodes that were drafted, those that were right, and steps of a sequence that had a draft."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence that decodes and may have a draft. `room`: nodes at most, by its pages, its limit and its own settings."""

    sequence: int
    tokens: Sequence[int]
    room: int


class Speculation:
    def __init__(self, drafter: Drafter, limits: Limits) -> None:
        self.counts = Counts()
        self._drafter, self._limits = drafter, limits
        self._acceptance, self._costs = Acceptance(), StepCosts()
        self._idle: dict[int, int] = {}  # steps since a sequence's last draft

    @property
    def name(self) -> str:
        return self._drafter.name

    def plan(self, wishes: Sequence[Wish], decodes: int, step_tokens: int, room: int) -> dict[int, DraftTree]:
        """Trees for a step that has `step_tokens` tokens without them, `decodes` of answers, and room for so many more."""
        trees: dict[int, DraftTree] = {}
        plan = _Plan(decodes, step_tokens)
        for wish in wishes:
            tree = self._proposed(wish, min(room - plan.drafted, wish.room))
            if tree is None:
                continue
            count = self._best(wish.sequence, tree, plan)
            if count == 0 and self._idle.get(wish.sequence, 0) >= PROBE_EVERY:
                count = 1
                plan.drafted += 1
            if count == 0:
                self._idle[wish.sequence] = self._idle.get(wish.sequence, 0) + 1
                continue
            self._idle[wish.sequence] = 0
            trees[wish.sequence] = tree.first(count)
        return trees

    def settled(self, sequence: int, tree: DraftTree, right: Sequence[int]) -> None:
        """A step has checked `tree`, of which the nodes `right` were right."""
        self._acceptance.learn(sequence, tree, right)
        self.counts.drafted += len(tree)
        self.counts.accepted += len(right)
        self.counts.steps += 1

    def observe(self, tokens: int, ms: float) -> None:
        """A step without prompt tokens, over `tokens` tokens with its drafts, took `ms`."""
        self._costs.observe(tokens, ms)

    @property
    def row_cost(self) -> float:
        """How much longer a row more makes a step of one, as measured."""
        return self._costs.ratio(1, 1) - 1

    def forget(self, sequence: int) -> None:
        self._drafter.forget(sequence)
        self._acceptance.forget(sequence)
        self._idle.pop(sequence, None)

    def _proposed(self, wish: Wish, room: int) -> DraftTree | None:
        if room <= 0:
            return None
        limits = Limits(min(room, self._limits.nodes), min(room, self._limits.depth), self._limits.branches)
        tree = self._drafter.propose(wish.sequence, wish.tokens, limits)
        return tree if len(tree) else None

    def _best(self, sequence: int, tree: DraftTree, plan: _Plan) -> int:
        """How many first nodes of `tree` pay, which then belong to the plan."""
        best, promised, more, highest = 0, 0.0, 0.0, plan.gain * LEAST_GAIN
        for count, chance in enumerate(self._acceptance.expected(sequence, tree), 1):
            more += chance
            gain = (plan.expected + more) / plan.decodes / self._costs.ratio(plan.step_tokens, plan.drafted + count)
            if gain > highest:
                best, promised, highest = count, more, gain
        if best:
            plan.expected += promised
            plan.drafted += best
            plan.gain = highest
        return best


class _Plan:
    """The step so far: tokens of answers that it is expected to bring, nodes drafted, and what that gains."""

    __slots__ = ("decodes", "drafted", "expected", "gain", "step_tokens")

    def __init__(self, decodes: int, step_tokens: int) -> None:
        self.decodes, self.step_tokens = decodes, step_tokens
        self.expected, self.drafted, self.gain = float(decodes), 0, 1.0
