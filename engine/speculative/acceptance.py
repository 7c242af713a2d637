"""How often drafts turn out right, by how confident the drafter was: of all sequences, and of each by itself.

A node is tried when its parent was right. What a sequence has shown outweighs what all have shown after a few trials, and what is
long ago counts less and less. Invariant: a chance is above 0 and below 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.speculative.tree import DraftTree

_LEVELS = (3, 4, 6, 8, 12, 16, 24, 32)  # confidences from each on are taken together
_PRIOR = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # before anything was tried, of each level
_PRIOR_TRIALS = 8.0  # that the prior counts for
_SHARED_TRIALS = 4.0  # that all sequences count for in the eyes of one
_FADE = 0.95  # of a sequence's trials with each new one
_SHARED_FADE = 0.995


class _Counts:
    __slots__ = ("right", "trials")

    def __init__(self) -> None:
        self.right = [0.0] * len(_PRIOR)
        self.trials = [0.0] * len(_PRIOR)

    def add(self, level: int, right: bool, fade: float) -> None:
        self.right[level] = self.right[level] * fade + right
        self.trials[level] = self.trials[level] * fade + 1


class Acceptance:
    def __init__(self) -> None:
        self._shared = _Counts()
        self._own: dict[int, _Counts] = {}

    def chance(self, sequence: int, confidence: int) -> float:
        """That a node of this confidence is right, if its parent is."""
        level = bisect_right(_LEVELS, confidence)
        shared = (self._shared.right[level] + _PRIOR_TRIALS * _PRIOR[level]) / (self._shared.trials[level] + _PRIOR_TRIALS)
        own = self._own.get(sequence)
        if own is None:
            return shared
        return (own.right[level] + _SHARED_TRIALS * shared) / (own.trials[level] + _SHARED_TRIALS)

    def expected(self, sequence: int, tree: DraftTree) -> list[float]:
        """Of each node, the chance that it and all before it on its path are right. Its siblings share what is left by it."""
        reached: list[float] = []
        left = [1.0] * (len(tree) + 1)  # of each node, and at the end of the last token: what its children have not taken
        for parent, confidence in zip(tree.parents, tree.confidence, strict=True):
            share = left[parent] * self.chance(sequence, confidence)
            left[parent] -= share
            reached.append(share * (reached[parent] if parent >= 0 else 1.0))
        return reached

    def learn(self, sequence: int, tree: DraftTree, right: Sequence[int]) -> None:
        """`right`: the nodes that the model would have said itself."""
        said = set(right)
        own = self._own.setdefault(sequence, _Counts())
        for node, (parent, confidence) in enumerate(zip(tree.parents, tree.confidence, strict=True)):
            if parent >= 0 and parent not in said:
                continue
            level = bisect_right(_LEVELS, confidence)
            own.add(level, node in said, _FADE)
            self._shared.add(level, node in said, _SHARED_FADE)

    def forget(self, sequence: int) -> None:
        self._own.pop(sequence, None)
