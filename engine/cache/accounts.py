"""The accounts of the cache, counted afresh from leases and tree: whether they are what is believed, and how full pages are.

Nothing here is on the way of a step. Invariant: nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.cache.blocks import PageGroup
from engine.cache.lease import Lease
from engine.cache.radix import KEY_BYTES, PINNED, Node, RadixTree, key_of
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS


def filled(groups: Sequence[PageGroup], tree: RadixTree, leases: Iterable[Lease]) -> tuple[int, int]:
    """(slots with a computed token, slots) of the pages, owned or kept, of groups that grow."""
    growing = _growing(groups)
    full = slots = 0
    for node in tree.nodes():
        there = sum(node.pages[group] != NO_PAGE for group in growing)
        full, slots = full + there * node.size, slots + there * PAGE_TOKENS
    for lease in leases:
        for group in growing:
            for number in range(max(len(lease.path), lease.first[group]), len(lease.pages[group])):
                full += min(PAGE_TOKENS, max(0, lease.computed - number * PAGE_TOKENS))
                slots += PAGE_TOKENS
    return full, slots


def check(groups: Sequence[PageGroup], tree: RadixTree, leases: Iterable[Lease]) -> None:
    """Raise AssertionError unless leases and tree are sound, and account for every page that is not free."""
    owners: list[Counter[int]] = [Counter() for _ in groups]
    kept: list[dict[int, bool]] = [{} for _ in groups]
    for lease in leases:
        _check_lease(groups, lease)
        _count_owned(lease, owners)
    for node in tree.nodes():
        _check_node(groups, node)
        for index, page in enumerate(node.pages):
            if page != NO_PAGE:
                assert page not in kept[index], "two nodes have the same page"
                kept[index][page] = node.rank == PINNED
    for group, owned, pages in zip(groups, owners, kept, strict=True):
        group.check(dict(owned), pages)


def _growing(groups: Sequence[PageGroup]) -> list[int]:
    return [index for index, group in enumerate(groups) if group.grows]


def _check_lease(groups: Sequence[PageGroup], lease: Lease) -> None:
    growing = _growing(groups)
    for index in growing:
        pages, first = lease.pages[index], lease.first[index]
        assert len(pages) == len(lease.pages[growing[0]]), "groups of a lease differ in length"
        assert all(page == NO_PAGE for page in pages[:first]), "a page is held before the window"
        assert NO_PAGE not in pages[first:], "a hole inside the window"
        for number, node in enumerate(lease.path[first:], first):
            assert node.pages[index] in (pages[number], NO_PAGE), "a lease and its path have different pages"
    for number, node in enumerate(lease.path):
        assert node.alive and node.key == key_of(lease.tokens[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS])
    assert lease in lease.node.leases, "a node does not know who stands there"


def _check_node(groups: Sequence[PageGroup], node: Node) -> None:
    assert node.alive and node.parent is not None and node.depth == node.parent.depth + 1
    line = node.parent.children if len(node.key) == KEY_BYTES else node.parent.tails
    assert line.get(node.key) is node and 0 < len(node.key) <= KEY_BYTES
    assert len(node.key) == KEY_BYTES or node.is_leaf, "something hangs below a tail"
    assert node.rank <= node.parent.rank or node.parent.parent is None, "a node outlives its parent"
    whole = [index for index, group in enumerate(groups) if group.kind in ("full", "latent")]
    assert all(node.pages[index] != NO_PAGE for index in whole), "a node lacks a page that cannot go alone"
    assert not node.is_leaf or any(page != NO_PAGE for page in node.pages), "an empty node"


def _count_owned(lease: Lease, owners: list[Counter[int]]) -> None:
    for index, pages in enumerate(lease.pages):
        owners[index].update(pages[lease.first[index] :])
    for copy in lease.copies:
        owners[copy.group][copy.source] += 1
    for pages in lease.snapshots.values():
        for index, page in pages:
            owners[index][page] += 1
