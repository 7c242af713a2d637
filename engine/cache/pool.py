"""One memory budget turned into pages for each cache group.

Owns the arithmetic only: what is free is measured in engine/runtime/memory.py, and the executor allocates.
Invariant: the pages returned cost at most the budget, and no group gets more than `max_sequences` sequences can use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.cache.blocks import most_pages, pages_for
from engine.cache.layout import CacheGroup, CacheLayout


def context_pages(layout: CacheLayout, context_tokens: int) -> tuple[int, ...]:
    """Pages of each group that one sequence of `context_tokens` tokens cannot do without."""
    return tuple(1 if group.kind == "state" else most_pages(group.window_tokens, context_tokens) for group in layout.groups)


def pages_bytes(layout: CacheLayout, pages: Sequence[int]) -> int:
    """Bytes of that many pages of each group."""
    return sum(count * group.bytes_per_page for group, count in zip(layout.groups, pages, strict=True))


def state_pages(max_sequences: int) -> int:
    """States that can be of use: each sequence has the one it lives by, and as many again hold prefixes."""
    return 2 * max_sequences


def pages_for_budget(
    layout: CacheLayout, budget_bytes: int, *, context_tokens: int, max_sequences: int, max_step_tokens: int
) -> tuple[int, ...]:
    """Share `budget_bytes` among the groups: first one sequence of full context, then evenly, each group up to what it can use.

    Evenly in pages, because a sequence shorter than the window needs as many pages of a window group as of a full one.
    A budget below one full context is shared evenly too; a group may then end with no page at all.
    """
    one = context_pages(layout, context_tokens)
    most = tuple(_useful_pages(group, context_tokens, max_sequences, max_step_tokens) for group in layout.groups)
    rest = budget_bytes - pages_bytes(layout, one)
    if rest < 0:
        return _share(layout, budget_bytes, one)
    more = _share(layout, rest, [m - o for m, o in zip(most, one, strict=True)])
    return tuple(o + m for o, m in zip(one, more, strict=True))


def _useful_pages(group: CacheGroup, context_tokens: int, max_sequences: int, max_step_tokens: int) -> int:
    """Pages that `max_sequences` sequences can fill. In a window group a chunk is written before the window moves past it."""
    if group.kind == "state":
        return state_pages(max_sequences)
    chunk = 0 if group.window_tokens is None else pages_for(max_step_tokens)
    return min(
        max_sequences * most_pages(group.window_tokens, context_tokens) + chunk,
        max_sequences * pages_for(context_tokens),
    )


def _share(layout: CacheLayout, budget_bytes: int, caps: Sequence[int]) -> tuple[int, ...]:
    """The largest equal number of pages for each group, cut at `caps`, that `budget_bytes` pays for."""

    def cut(level: int) -> tuple[int, ...]:
        return tuple(min(level, cap) for cap in caps)

    level = bisect_right(range(max(caps) + 1), budget_bytes, key=lambda level: pages_bytes(layout, cut(level))) - 1
    return cut(level)
