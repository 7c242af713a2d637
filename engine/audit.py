"""Checks the accounts of an engine in production: at most so often, only after something changed, and never at a cost that is felt.

A check counts everything afresh, so its time grows with the cache. One that streams would feel waits for a moment without work, a
minute at most, and none is repeated before SPARING times as long as it took.
Invariant: a wrong account is logged and counted, and nobody fails because of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SPARING = 100
FELT_S = 0.01
LONGEST_WAIT_S = 60.0


class Audit:
    """`errors` counts the checks that found the accounts wrong. `stopwatch` measures what they take."""

    def __init__(self, check: Callable[[], None], interval_s: float, stopwatch: Callable[[], float] = time.perf_counter) -> None:
        self.errors = 0
        self._check, self._interval_s, self._stopwatch = check, interval_s, stopwatch
        self._changed = False
        self._took_s = 0.0
        self._due = self._overdue = 0.0

    def changed(self) -> None:
        """There is something new to check."""
        self._changed = True

    def tick(self, now: float, *, idle: bool) -> float | None:
        """Check if it is time to. Gives the time of the next check, None when nothing has changed since the last one."""
        felt = self._took_s > FELT_S and not idle
        if self._changed and now >= (self._overdue if felt else self._due):
            self._run(now)
        return self._due if self._changed else None

    def _run(self, now: float) -> None:
        started = self._stopwatch()
        try:
            self._check()
        except AssertionError as error:
            self.errors += 1
            log.error("the accounts of the cache are wrong: %s", error)
        self._changed = False
        self._took_s = self._stopwatch() - started
        self._due = now + max(self._interval_s, SPARING * self._took_s)
        self._overdue = max(self._due, now + LONGEST_WAIT_S)
