"""One running sequence's part of the cache: its block table, its way through the tree, and what it still waits for.

    pages[group]:  [ NO_PAGE NO_PAGE | 7 3 9 | 4 5 ]
                     0 .. first - 1  | path  | its own, not yet full or not yet confirmed
Plain data, changed by CacheManager only. Invariant: it owns every page from `first` on, the source pages of its copies, and the
snapshots that no node has yet; page i of its path is that of path[i], unless the tree has lost it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.radix import Namespace, Node
from engine.runtime.batch import PAGE_TOKENS

UNBOUNDED_TOKENS = 1 << 62  # what a sequence may have in a model that keeps a state alone


@dataclass(slots=True, eq=False)
class Copy:
    """A page to be copied before the first step."""

    group: int
    source: int
    target: int


@dataclass(slots=True, eq=False)
class Lease:
    namespace: Namespace
    tokens: list[int]  # the sequence's own list, which grows
    rank: int
    pin_tokens: int  # so many first tokens are to be pinned
    pages: list[list[int]]  # as a row wants them; of a state group the one page that holds the live state
    first: list[int]  # per group: index of the first page still owned
    root: Node
    path: list[Node] = field(default_factory=list)  # the nodes of its full pages
    hit: int = 0  # tokens that were in the cache at the start
    computed: int = 0  # as of the last confirmation
    copies: list[Copy] = field(default_factory=list)  # until the first step is confirmed
    stops: set[int] = field(default_factory=set)  # where snapshots of the state are due, besides the regular ones
    snapshots: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # position -> (group, page), not confirmed yet
    brought: list[tuple[Node, int, int]] = field(default_factory=list)  # (node, group, page) that it gave the tree
    growing: int = 0  # index of a group that grows with the sequence, -1 if there is none

    @property
    def node(self) -> Node:
        """Its deepest node."""
        return self.path[-1] if self.path else self.root

    @property
    def registered(self) -> int:
        """Tokens that are in the tree."""
        return len(self.path) * PAGE_TOKENS

    @property
    def capacity(self) -> int:
        """Tokens that its pages have room for."""
        return UNBOUNDED_TOKENS if self.growing < 0 else len(self.pages[self.growing]) * PAGE_TOKENS
