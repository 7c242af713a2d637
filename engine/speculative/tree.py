"""A tree of drafted tokens.

Invariant of a tree: parents come before their children, no node has two children of the same token. A chain is a tree of width 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`parents[i]` is the parent of node i among the nodes, -1 the last token. `confidence`: on the drafter's own scale."""

    tokens: list[int]
    parents: list[int]
    confidence: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> DraftTree:
        """The tree of its first `count` nodes."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.confidence[:count])

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes along which the tree says `tokens`, as far as it does."""
        path: list[int] = []
        node = -1
        for token in tokens:
            child = next((i for i in range(node + 1, len(self)) if self.parents[i] == node and self.tokens[i] == token), None)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def depths(self) -> list[int]:
        """Of each node, how many tokens it is ahead: 1 for a child of the last token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tree."""

    nodes: int
    depth: int
    branches: int
