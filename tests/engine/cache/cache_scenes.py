"""Pieces of the scenes that the tests of the cache are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable

from engine.cache.radix import Namespace
from engine.runtime.batch import PAGE_TOKENS
from tests.engine.cache.cache_run import CacheRun

B = PAGE_TOKENS


def ids(kind: int, pages: int, more: int = 0) -> list[int]:
    """A prompt like no other of another kind."""
    return [1000 * kind + n for n in range(pages * B + more)]


def cached(run: CacheRun, tokens: list[int]) -> int:
    """How many first tokens of `tokens` are there."""
    return run.cache.probe(Namespace(), [*tokens, 999_999])


def make_room(run: CacheRun, pages: int) -> None:
    """Have `pages` pages taken and given back, and nothing of it kept."""
    lease = run.open([888_000 + n for n in range(pages * B)])
    run.cache.extend(lease, pages * B)
    run.discard(lease)


def calls(work: Callable[[], object]) -> int:
    """Calls of Python and built-in functions that `work` makes: a cost that no neighbour on the machine changes."""
    count = 0

    def heard(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
