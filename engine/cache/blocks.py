"""Pages of the KV cache and who holds them: a PageGroup for each cache group, a BlockTable for each sequence.

Pages are numbers here; their bytes belong to the executor. A page is free or has as many holders as its reference count says, and
goes back to the free pages when the last one lets go. Nothing here decides who gets pages: that is the scheduler's.
Invariant (`check`): every page is either free or held, never both, and each reference count equals the holders found by counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.cache.layout import CacheLayout
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens fill, the last perhaps in part."""
    return -(-tokens // PAGE_TOKENS)


def most_pages(window_tokens: int | None, tokens: int) -> int:
    """Most pages that a sequence of `tokens` tokens must hold at once when it is fed token by token.

    Within a window of W, a query needs the W tokens that end with itself; at the worst alignment they touch (W - 2) // B + 2 pages.
    """
    if window_tokens is None:
        return pages_for(tokens)
    return min(pages_for(tokens), (window_tokens - 2) // PAGE_TOKENS + 2)


class PageGroup:
    """The pages of one cache group. Low numbers are handed out first, so pages never needed are never touched."""

    def __init__(self, window_tokens: int | None, pages: int) -> None:
        self.window_tokens = window_tokens
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page, now with one holder. The caller has made sure that there is one."""
        page = self._free.pop()
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder for a page that has one."""
        assert self._references[page] > 0, "a free page cannot be shared"
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder less."""
        assert self._references[page] > 0, "a free page was released"
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless `held` (page -> holders, counted by the caller) is what this group believes."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(held), f"pages both free and held: {sorted(free & held.keys())}"
        assert len(free) + len(held) == self.total, f"{len(free)} free + {len(held)} held pages are not {self.total}"
        wrong = {page: (self._references[page], count) for page, count in held.items() if self._references[page] != count}
        assert not wrong, f"reference counts (believed, found): {wrong}"


@dataclass(slots=True, eq=False)
class BlockTable:
    """The pages of one sequence: pages[group][t // PAGE_TOKENS] holds token t, NO_PAGE where it fell out of the window.

    pages[group]:  [ NO_PAGE NO_PAGE | 7 3 9 ]
                     0 .. first - 1    first ..     all groups are equally long
    """

    pages: list[list[int]]
    first: list[int]  # per group: index of the first page still held

    @property
    def tokens(self) -> int:
        """Tokens that the table has room for."""
        return len(self.pages[0]) * PAGE_TOKENS


class BlockAllocator:
    """Hands pages of every group to block tables, all groups together, and takes them back."""

    def __init__(self, layout: CacheLayout, pages: Sequence[int]) -> None:
        assert len(pages) == len(layout.groups), "one page count for each cache group"
        self.groups = tuple(PageGroup(group.window_tokens, count) for group, count in zip(layout.groups, pages, strict=True))

    @property
    def total_pages(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def used_pages(self) -> int:
        return sum(group.total - group.free for group in self.groups)

    def table(self) -> BlockTable:
        """An empty table."""
        return BlockTable([[] for _ in self.groups], [0] * len(self.groups))

    def room(self, table: BlockTable) -> int:
        """Tokens that `table` could cover if it took every free page."""
        return table.tokens + min(group.free for group in self.groups) * PAGE_TOKENS

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Let `table` cover `tokens` tokens. The caller has checked `room`."""
        for group, pages in zip(self.groups, table.pages, strict=True):
            pages.extend(group.take() for _ in range(pages_for(tokens) - len(pages)))

    def trim(self, table: BlockTable, position: int) -> None:
        """Give back the pages of window groups that no query at `position` or later can see."""
        for index, group in enumerate(self.groups):
            if group.window_tokens is None:
                continue
            pages, oldest = table.pages[index], position - group.window_tokens + 1
            keep = min(max(oldest // PAGE_TOKENS, table.first[index]), len(pages))
            for i in range(table.first[index], keep):
                group.release(pages[i])
                pages[i] = NO_PAGE
            table.first[index] = keep

    def release(self, table: BlockTable) -> None:
        """Give back all pages of `table` and empty it."""
        for group, pages, first in zip(self.groups, table.pages, table.first, strict=True):
            for page in reversed(pages[first:]):
                group.release(page)
            pages.clear()
        table.first = [0] * len(self.groups)

    def shortage(self, tokens: int) -> tuple[int, int] | None:
        """(pages needed, pages there are) of a group that can never hold a sequence of `tokens` tokens; None when all can."""
        for group in self.groups:
            need = most_pages(group.window_tokens, tokens)
            if need > group.total:
                return need, group.total
        return None

    def can_start(self, tokens: int, spare: int) -> bool:
        """Whether a sequence of `tokens` tokens fits now and leaves `spare` pages of every group free."""
        return all(group.free >= most_pages(group.window_tokens, tokens) + spare for group in self.groups)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError unless `tables`, which must be all there are, account for every page that is not free."""
        held: list[Counter[int]] = [Counter() for _ in self.groups]
        for table in tables:
            assert len({len(pages) for pages in table.pages}) == 1, "groups of a table differ in length"
            for counter, pages, first in zip(held, table.pages, table.first, strict=True):
                assert all(page == NO_PAGE for page in pages[:first]), "a page is held before the window"
                assert NO_PAGE not in pages[first:], "a hole inside the window"
                counter.update(pages[first:])
        for group, counter in zip(self.groups, held, strict=True):
            group.check(counter)
