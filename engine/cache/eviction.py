"""Who leaves the prefix cache: by class, then by age, then the deepest, when space is needed; by age alone when nobody asks.

Each group has a queue of candidates for each class. They may hold stale entries: these are put right when they come up, which they
do too early and never too late, because a node's class and last use only rise while it waits (when they fall, the node is offered
anew); when too many pile up they are swept out. Pages of a full or latent group go with their node, which must be a leaf; pages of
a window and snapshots of a state go alone.
Invariant: every node with a page that could be evicted is in the queue of that group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from engine.cache.blocks import PageGroup
from engine.cache.radix import PINNED, Node, RadixTree
from engine.runtime.batch import NO_PAGE

_Entry = tuple[float, int, int, Node]  # last use, -depth, number (never equal), node


class Eviction:
    def __init__(self, tree: RadixTree, groups: Sequence[PageGroup], retention_s: Sequence[float]) -> None:
        """`retention_s` by class: how long an unused page stays."""
        self.evicted_pages = 0
        self._tree, self._groups = tree, groups
        self._retention_s = tuple(retention_s)
        self._whole = [group.kind in ("full", "latent") for group in groups]
        self._homes: list[dict[int, Node]] = [{} for _ in groups]  # by group: page -> the node that it hangs at
        self._queues: list[list[list[_Entry]]] = [[[] for _ in retention_s] for _ in groups]  # by group and class
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
                self._push(node, index)

    def make_free(self, index: int) -> None:
        """Evict until group `index` has a free page. The caller has made sure that it can."""
        while not self._groups[index].free:
            rank = next(rank for rank in range(len(self._retention_s)) if self._first(index, rank))
            self._evict(index, rank)

    def pin(self, node: Node) -> None:
        """Keep all pages of `node`, those that it has and those to come, until it is unpinned."""
        node.rank = PINNED
        self._keep(node, pinned=True)

    def unpin(self, node: Node, rank: int) -> None:
        """Let `node` be of another class."""
        node.rank = rank
        self._keep(node, pinned=False)
        node.offered = 0  # wherever it is queued still, it may have to go before that
        self.offer(node)

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
        if node.parent is None:
            self._tree.vacate(node)
        elif node.alive:
            self.offer(node)

    def expire(self, now: float) -> float | None:
        """Remove what was not used for its time. Gives when the next will be due."""
        due = math.inf
        for index in range(len(self._groups)):
            for rank, retention_s in enumerate(self._retention_s):
                while entry := self._first(index, rank):
                    if entry[0] + retention_s > now:
                        due = min(due, entry[0] + retention_s)
                        break
                    self._evict(index, rank)
        self._tree.forget_empty()
        return None if due == math.inf else due

    def drop(self, node: Node, index: int) -> None:
        """Let go of a page, unless a lease goes through it or something needs the node that it goes with.

        Whoever owns a page of a leaf only copies from it, and has it until then though nobody else finds it any more.
        """
        if node.is_leaf or not (self._whole[index] or self._groups[index].owners(node.pages[index])):
            self._take_out(node, index)

    def home(self, index: int, page: int) -> Node | None:
        """The node that a page hangs at."""
        return self._homes[index].get(page)

    def owned(self, node: Node) -> bool:
        """Whether a lease holds a page of it."""
        return any(page != NO_PAGE and group.owners(page) for page, group in zip(node.pages, self._groups, strict=True))

    def _keep(self, node: Node, *, pinned: bool) -> None:
        for group, page in zip(self._groups, node.pages, strict=True):
            if page != NO_PAGE:
                group.keep(page, pinned=pinned)

    def _is_candidate(self, node: Node, index: int) -> bool:
        page = node.pages[index]
        if not node.alive or page == NO_PAGE or node.rank == PINNED or self._groups[index].owners(page):
            return False
        return not self._whole[index] or node.is_leaf

    def _push(self, node: Node, index: int) -> None:
        queue = self._queues[index][node.rank]
        if len(queue) > 2 * self._groups[index].total:
            self._sweep(queue, index)
        node.offered |= 1 << index
        heappush(queue, (node.used, -node.depth, next(self._number), node))

    def _first(self, index: int, rank: int) -> _Entry | None:
        """What goes first of a class, at the front of its queue."""
        queue = self._queues[index][rank]
        while queue:
            used, *_, node = queue[0]
            candidate = self._is_candidate(node, index)
            if candidate and (node.rank, node.used) == (rank, used):
                return queue[0]
            heappop(queue)
            node.offered &= ~(1 << index)
            if candidate:
                self._push(node, index)
        return None

    def _sweep(self, queue: list[_Entry], index: int) -> None:
        """Drop the entries of nodes that are no candidates: there are at most as many candidates as pages."""
        live: dict[Node, _Entry] = {}
        for entry in queue:
            node = entry[-1]
            if self._is_candidate(node, index):
                live[node] = min(entry, live.get(node, entry))
            else:
                node.offered &= ~(1 << index)
        queue[:] = live.values()
        heapify(queue)

    def _evict(self, index: int, rank: int) -> None:
        """Let go the first of a queue, which `_first` has put there."""
        node = heappop(self._queues[index][rank])[-1]
        node.offered &= ~(1 << index)
        whole = self._whole[index] or node.is_tail
        self.evicted_pages += sum(page != NO_PAGE for page in node.pages) if whole else 1
        self._take_out(node, index)

    def _take_out(self, node: Node, index: int) -> None:
        """Remove the page that `node` has of a group, with the node when they go together."""
        if self._whole[index] or node.is_tail:
            self.remove(node)
            return
        self._take_down(node, index)
        self.prune(node)

    def _take_down(self, node: Node, index: int) -> None:
        self._groups[index].drop(node.pages[index])
        del self._homes[index][node.pages[index]]
        node.pages[index] = NO_PAGE
