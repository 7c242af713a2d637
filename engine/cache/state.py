"""Where the state of a recurrent model is worth a snapshot: a prefix can be shared only where one was taken.

Taken at: the last page end before the prompt's end (the next request with this prompt), every SNAPSHOT_TOKENS (a bound on what must
be computed again), and where a prompt leaves a path that others took (the next one that does starts there). Not here: who keeps
them.
"""

from __future__ import annotations

from engine.runtime.batch import PAGE_TOKENS

SNAPSHOT_TOKENS = 64 * PAGE_TOKENS


def stops_of(tokens: int, branch: int, hit: int) -> set[int]:
    """Positions, past `hit`, for a prompt of `tokens` tokens whose first `branch` ids are in the tree."""
    last = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    return {position for position in (last, branch // PAGE_TOKENS * PAGE_TOKENS) if position > hit}


def next_stop(stops: set[int], start: int) -> int:
    """The first position after `start` that a row must not reach past."""
    regular = (start // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
    return min([regular, *(position for position in stops if position > start)])


def is_stop(stops: set[int], position: int) -> bool:
    return position in stops or (position > 0 and position % SNAPSHOT_TOKENS == 0)
