"""The longest cached prefix that all groups of a cache can serve together.

Whole pages come from the tree; the start of one more from a node below, or from a running sequence that stands there. A window
needs only the pages that a query after the prefix can see, but needs all of them; a state only exactly where a snapshot hangs.
Changes nothing. Invariant: of a prompt at least one token is left to compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.cache.blocks import PageGroup
from engine.cache.radix import ID_BYTES, KEY_BYTES, Namespace, Node, RadixTree, common_tokens, key_of
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Match:
    """`path`: nodes to share. `sources`: by group, the page to copy what is beyond them from (NO_PAGE: nothing).

    `first`: by group, how many pages of the path nobody will look at. `branch`: tokens that the tree has, whoever can serve them.
    """

    path: Sequence[Node] = ()
    hit: int = 0
    sources: Sequence[int] = ()
    first: Sequence[int] = ()
    branch: int = 0


@dataclass(frozen=True, slots=True)
class _Source:
    """Pages by group that hold `tokens` tokens wanted beyond a path."""

    tokens: int
    pages: Sequence[int]
    node: Node | None


class Matcher:
    def __init__(self, tree: RadixTree, groups: Sequence[PageGroup]) -> None:
        self._tree, self._groups = tree, groups
        self._growing = [index for index, group in enumerate(groups) if group.grows]
        self._states = [index for index, group in enumerate(groups) if not group.grows]

    def find(self, namespace: Namespace, data: bytes, *, whole_pages: bool = False) -> Match:
        """The best match of the token ids `data`; with `whole_pages` none that copies a page of a group that grows."""
        limit = len(data) // ID_BYTES - 1
        path = self._tree.path(namespace, data, limit)
        if not path:
            return Match()
        rest = data[(len(path) - 1) * KEY_BYTES : min(limit * ID_BYTES, len(path) * KEY_BYTES)]
        branch = (len(path) - 1) * PAGE_TOKENS + max((common_tokens(node.key, rest) for node in path[-1].alike(rest)), default=0)
        runs = self._runs(path)
        for depth in range(len(path) - 1, -1, -1):
            after = data[depth * KEY_BYTES : min(limit * ID_BYTES, (depth + 1) * KEY_BYTES)]
            sources = [] if whole_pages else self._partial(path[depth], after, depth == len(path) - 1)
            for source in [*sources, _Source(0, [NO_PAGE] * len(self._groups), None)]:
                match = self._served(path[: depth + 1], source, runs[depth], branch)
                if match is not None:
                    return match
        return Match(branch=branch)

    def _runs(self, path: Sequence[Node]) -> list[list[int]]:
        """At each depth, by group: how many pages in a row up to there are present."""
        runs = [[0] * len(self._groups)]
        for node in path[1:]:
            runs.append([run + 1 if page != NO_PAGE else 0 for run, page in zip(runs[-1], node.pages, strict=True)])
        return runs

    def _partial(self, node: Node, rest: bytes, deepest: bool) -> list[_Source]:
        """What hangs below `node` and begins like `rest`, the best first. With a state, only tails that it says all of."""
        if self._states:
            tails = [tail for tail in node.tails_within(rest) if all(tail.pages[i] != NO_PAGE for i in self._states)]
            found = [_Source(tail.size, tail.pages, tail) for tail in tails]
        elif not deepest:
            return []
        else:
            found = [_Source(common_tokens(child.key, rest), child.pages, child) for child in node.alike(rest)]
            found += self._running(node, rest)
        usable = [source for source in found if source.tokens and all(source.pages[i] != NO_PAGE for i in self._growing)]
        return sorted(usable, key=lambda source: -source.tokens)

    def _running(self, node: Node, rest: bytes) -> Iterator[_Source]:
        """The last, not yet full pages of running sequences."""
        for lease in node.leases:
            tail = key_of(lease.tokens[lease.registered : lease.computed])
            if tail and not lease.copies:
                pages = [lease.pages[i][node.depth] if group.grows else NO_PAGE for i, group in enumerate(self._groups)]
                yield _Source(common_tokens(tail, rest), pages, None)

    def _served(self, path: Sequence[Node], source: _Source, runs: Sequence[int], branch: int) -> Match | None:
        """The match of this path and source, if every group can serve it."""
        depth, hit = len(path) - 1, (len(path) - 1) * PAGE_TOKENS + source.tokens
        sources, first = [NO_PAGE] * len(self._groups), [0] * len(self._groups)
        for index in self._growing:
            window = self._groups[index].window_tokens
            first[index] = 0 if window is None else min(depth, max(0, hit - window + 1) // PAGE_TOKENS)
            if runs[index] < depth - first[index]:
                return None
            if source.tokens:
                sources[index] = source.pages[index]
        if hit and self._states:
            node = source.node or path[-1]
            for index in self._states:
                if node.pages[index] == NO_PAGE:
                    return None
                sources[index] = node.pages[index]
        return Match(path[1:], hit, sources, first, branch)
