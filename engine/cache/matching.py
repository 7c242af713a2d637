"""The longest cached prefix that all groups of a cache can serve together.

Whole pages come from the tree; the start of one more from a node below, or from a running sequence that stands there. A window
needs only the pages that a query after the prefix can see, but needs all of them; a state only exactly where a snapshot hangs.
Changes nothing. Invariant: of a prompt at least one token is left to compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.cache.blocks import PageGroup, pages_for
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
        self._windows = [index for index, group in enumerate(groups) if group.kind == "window"]
        self._states = [index for index, group in enumerate(groups) if not group.grows]
        self._nothing = _Source(0, [NO_PAGE] * len(groups), None)

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
            for source in [*sources, self._nothing]:
                match = self._served(path, depth, source, runs, branch)
                if match is not None:
                    return match
        return Match(branch=branch)

    def _runs(self, path: Sequence[Node]) -> dict[int, list[int]]:
        """By window group, at each depth: how many pages in a row up to there are present."""
        runs: dict[int, list[int]] = {}
        for index in self._windows:
            found = runs[index] = [0]
            for node in path[1:]:
                found.append(found[-1] + 1 if node.pages[index] != NO_PAGE else 0)
        return runs

    def _partial(self, node: Node, rest: bytes, deepest: bool) -> list[_Source]:
        """What hangs below `node` and begins like `rest`, the best first. With a state, only tails that it says all of."""
        if self._states and not node.tails:
            return []
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

    def _served(self, path: Sequence[Node], depth: int, source: _Source, runs: dict[int, list[int]], branch: int) -> Match | None:
        """The match of the first `depth` pages of `path` and of this source, if every group can serve it."""
        hit = depth * PAGE_TOKENS + source.tokens
        first = [0] * len(self._groups)
        for index, run in runs.items():
            window = self._groups[index].window_tokens or hit
            first[index] = min(depth, max(0, hit - window + 1) // PAGE_TOKENS)
            if run[depth] < depth - first[index]:
                return None
        sources = [NO_PAGE] * len(self._groups)
        if source.tokens:
            sources = [page if group.grows else NO_PAGE for page, group in zip(source.pages, self._groups, strict=True)]
        for index in self._states if hit else []:
            sources[index] = (source.node or path[depth]).pages[index]
            if sources[index] == NO_PAGE:
                return None
        return Match(path[1 : depth + 1], hit, sources, first, branch)


def fits(group: PageGroup, index: int, match: Match, tokens: int, spare: int) -> bool:
    """Whether `tokens` tokens of a sequence that starts from `match` fit into group `index`, in chunks, with `spare` pages left.

    Shared pages that a window moves past are had again only if nobody else holds them, so each stage of that must fit.
    """
    source = match.sources[index] if match.sources else NO_PAGE
    at_hand = group.at_hand - (source != NO_PAGE and group.is_cached(source))
    if not group.grows:
        return at_hand >= 1
    shared = [node.pages[index] for node in match.path[match.first[index] :]] if match.first else []
    new, need = pages_for(tokens) - len(match.path), group.need(tokens)
    most = wanted = min(new, need)  # when all shared pages are out of the window
    for left, page in enumerate(reversed(shared), 1):
        wanted += group.is_cached(page) - (new > need - left)
        most = max(most, wanted) if group.window_tokens else wanted
    return at_hand >= most + spare
