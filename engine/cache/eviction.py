"""Who leaves the prefix cache: by class, then by age, then the deepest, when space is needed; by age alone when nobody asks.

Each group has a queue of candidates. It may hold stale entries: they are put right when they come up, which they do too early and
never too late, because a node's class and last use only rise while it waits (when they fall, the node is offered anew). Pages of a
full or latent group go with their node, which must be a leaf; pages of a window and snapshots of a state go alone.
Invariant: every node with a page that could be evicted is in the queue of that group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from engine.cache.blocks import PageGroup
from engine.cache.radix import PINNED, Node, RadixTree
from engine.runtime.batch import NO_PAGE

_Entry = tuple[int, float, int, int, Node]


class Eviction:
    def __init__(self, tree: RadixTree, groups: Sequence[PageGroup], retention_s: Sequence[float]) -> None:
        """`retention_s` by class: how long an unused page stays."""
        self.evicted_pages = 0
        self._tree, self._groups = tree, groups
        self._retention_s = (*retention_s, math.inf)
        self._whole = [group.kind in ("full", "latent") for group in groups]
        self._homes: list[dict[int, Node]] = [{} for _ in groups]  # by group: page -> the node that it hangs at
        self._queues: list[list[_Entry]] = [[] for _ in groups]
        self._number = count()

    def hang(self, node: Node, index: int, page: int) -> None:
        """Keep a page at a node, which has none of this group."""
        node.pages[index] = page
        self._homes[index][page] = node
        self._groups[index].keep(page, pinned=node.rank == PINNED)

    def disown(self, index: int, page: int) -> None:
        """A lease lets go of a page, which may now be a candidate."""
        self._groups[index].disown(page)
        if self._groups[index].is_cached(page):
            self.offer(self._homes[index][page])

    def offer(self, node: Node) -> None:
        """Something about `node` changed that may make it, or a page of it, a candidate."""
        for index in range(len(self._groups)):
            if not node.offered & 1 << index and self._is_candidate(node, index):
                node.offered |= 1 << index
                self._push(node, index)

    def make_free(self, index: int) -> None:
        """Evict until group `index` has a free page. The caller has made sure that it can."""
        while not self._groups[index].free:
            entry = heappop(self._queues[index])
            node = entry[4]
            if not self._is_candidate(node, index):
                node.offered &= ~(1 << index)
            elif (node.rank, node.used) != entry[:2]:
                self._push(node, index)
            else:
                self.evicted_pages += 1
                self._evict(node, index)

    def remove(self, node: Node) -> None:
        """Take a leaf out with all its pages, and whatever above it is left with neither pages nor anything below."""
        for index, page in enumerate(node.pages):
            if page != NO_PAGE:
                self._take_down(node, index)
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Cut `node` and those above it while they hold nothing; the first that stays may have become a candidate."""
        while node.parent is not None and node.alive and node.is_leaf and not any(page != NO_PAGE for page in node.pages):
            self._tree.cut(node)
            node = node.parent
        if node.parent is not None and node.alive:
            self.offer(node)

    def expire(self, now: float) -> float | None:
        """Remove what was not used for its time. Gives when the next will be due."""
        due = math.inf
        for node in list(self._tree.nodes()):
            if not node.alive or node.rank == PINNED:
                continue
            at = node.used + self._retention_s[node.rank]
            if at <= now and node.is_leaf and not self.owned(node):
                self.evicted_pages += sum(page != NO_PAGE for page in node.pages)
                self.remove(node)
            elif at > now:
                due = min(due, at)
        self._tree.forget_empty()
        return None if due == math.inf else due

    def owned(self, node: Node) -> bool:
        """Whether a lease holds a page of it."""
        return any(page != NO_PAGE and group.owners(page) for page, group in zip(node.pages, self._groups, strict=True))

    def _is_candidate(self, node: Node, index: int) -> bool:
        page = node.pages[index]
        if not node.alive or page == NO_PAGE or node.rank == PINNED or self._groups[index].owners(page):
            return False
        return not self._whole[index] or node.is_leaf

    def _push(self, node: Node, index: int) -> None:
        heappush(self._queues[index], (node.rank, node.used, -node.depth, next(self._number), node))

    def _evict(self, node: Node, index: int) -> None:
        node.offered &= ~(1 << index)
        if self._whole[index]:
            self.remove(node)
            return
        self._take_down(node, index)
        self.prune(node)

    def _take_down(self, node: Node, index: int) -> None:
        self._groups[index].drop(node.pages[index])
        del self._homes[index][node.pages[index]]
        node.pages[index] = NO_PAGE
