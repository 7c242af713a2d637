"""Pages of the cache and who holds them: free ones, those that running sequences own, those that the prefix cache keeps.

Pages are numbers here; their bytes belong to the executor. A page of a state group holds one whole state, any other page
PAGE_TOKENS tokens. Nothing here decides who gets pages. Invariant: every page is free, owned, cached or pinned, exactly one of
them; an owned page may be kept as well, and is cached or pinned when its last owner lets go.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from engine.cache.layout import CacheGroup, GroupKind
from engine.runtime.batch import PAGE_TOKENS

_GONE, _CACHED, _PINNED = 0, 1, 2


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
    """The pages of one cache group. Low numbers are handed out first, so pages never needed are never touched.

    `owned`, `cached` and `pinned` count pages; the last two those that nobody owns.
    """

    def __init__(self, group: CacheGroup, pages: int) -> None:
        self.kind: GroupKind = group.kind
        self.window_tokens = group.window_tokens
        self.total = pages
        self.owned = self.cached = self.pinned = 0
        self.all_pinned = 0  # owned ones too
        self._free = list(range(pages))  # a heap
        self._owners = [0] * pages
        self._kept = bytearray(pages)

    @property
    def grows(self) -> bool:
        """Whether a sequence needs more of these pages as it gets longer."""
        return self.kind != "state"

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def at_hand(self) -> int:
        """Pages that can be had: free ones and those that may be evicted."""
        return len(self._free) + self.cached

    def need(self, tokens: int) -> int:
        """Pages that a sequence of `tokens` tokens cannot do without."""
        return most_pages(self.window_tokens, tokens) if self.grows else 1

    def take(self) -> int:
        """A free page, now with one owner. The caller has made sure that there is one."""
        page = heappop(self._free)
        self._owners[page] = 1
        self.owned += 1
        return page

    def owners(self, page: int) -> int:
        return self._owners[page]

    def is_cached(self, page: int) -> bool:
        """Whether it is one of the pages that may be evicted, or will be once others are gone."""
        return self._kept[page] == _CACHED and self._owners[page] == 0

    def own(self, page: int) -> None:
        """One more owner of a page that somebody owns or that is kept."""
        if self._owners[page] == 0:
            assert self._kept[page], "a free page cannot be shared"
            self._count(page, -1)
            self.owned += 1
        self._owners[page] += 1

    def disown(self, page: int) -> None:
        """One owner less."""
        assert self._owners[page] > 0, "a page nobody owns was given back"
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self.owned -= 1
            self._settle(page)

    def keep(self, page: int, *, pinned: bool) -> None:
        """The prefix cache holds the page, from now on or in another way than before."""
        self.all_pinned += pinned - (self._kept[page] == _PINNED)
        if self._owners[page] == 0:
            assert self._kept[page], "a free page cannot be kept"
            self._count(page, -1)
        self._kept[page] = _PINNED if pinned else _CACHED
        if self._owners[page] == 0:
            self._count(page, 1)

    def drop(self, page: int) -> None:
        """The prefix cache holds the page no longer."""
        assert self._kept[page], "a page that is not kept was dropped"
        if self._owners[page] == 0:
            self._count(page, -1)
        self.all_pinned -= self._kept[page] == _PINNED
        self._kept[page] = _GONE
        if self._owners[page] == 0:
            heappush(self._free, page)

    def grow(self, pages: int) -> None:
        """Have `pages` pages from now on."""
        assert pages >= self.total, "pages cannot be taken away"
        more = pages - self.total
        self._free.extend(range(self.total, pages))
        heapify(self._free)
        self._owners.extend([0] * more)
        self._kept.extend(bytes(more))
        self.total = pages

    def held(self) -> Iterator[int]:
        """Pages that are not free."""
        return (page for page in range(self.total) if self._owners[page] or self._kept[page])

    def check(self, owners: dict[int, int], kept: dict[int, bool]) -> None:
        """Raise AssertionError unless what the caller counted (page -> owners; page -> whether pinned) is what is believed."""
        assert {page: n for page, n in enumerate(self._owners) if n} == owners, "owners, believed and found, differ"
        believed = {page: n == _PINNED for page, n in enumerate(self._kept) if n}
        assert believed == kept, "pages believed to be kept are not those in the tree"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free == set(range(self.total)) - owners.keys() - kept.keys(), "free pages are not those that nobody holds"
        unowned = [pinned for page, pinned in kept.items() if page not in owners]
        counted = (len(owners), unowned.count(False), unowned.count(True), sum(kept.values()))
        assert counted == (self.owned, self.cached, self.pinned, self.all_pinned), f"counts {counted} are believed to differ"

    def _settle(self, page: int) -> None:
        if self._kept[page]:
            self._count(page, 1)
        else:
            heappush(self._free, page)

    def _count(self, page: int, change: int) -> None:
        if self._kept[page] == _PINNED:
            self.pinned += change
        else:
            self.cached += change
