"""Checks the accounts of an engine in production: at most so often, only after something changed, and never at a cost that is felt.

A check counts everything afresh, so its time grows with the cache; it is repeated only after SPARING times as long as it took.
Invariant: a wrong account is logged and counted, and nobody fails because of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SPARING = 100


class Audit:
    """`errors` counts the checks that found the accounts wrong."""

    def __init__(self, check: Callable[[], None], interval_s: float) -> None:
        self.errors = 0
        self._check = check
        self._interval_s = interval_s
        self._changed = False
        self._due = 0.0

    def changed(self) -> None:
        """There is something new to check."""
        self._changed = True

    def tick(self, now: float) -> float | None:
        """Check if it is time to. Gives the time of the next check, None when nothing has changed since the last one."""
        if self._changed and now >= self._due:
            started = time.perf_counter()
            try:
                self._check()
            except AssertionError as error:
                self.errors += 1
                log.error("the accounts of the cache are wrong: %s", error)
            self._changed = False
            self._due = now + max(self._interval_s, SPARING * (time.perf_counter() - started))
        return self._due if self._changed else None
