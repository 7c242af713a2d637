"""How often the worker of each model died lately: how long the next one must wait, and whether there is to be one by itself.

Invariant: a worker that dies once is replaced at once; one that dies again and again is started ever more slowly, and by itself
only `RESTARTS` times in a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.5, 30.0
FORGIVE_S = 60.0  # a death this long after the one before it counts as the first
RESTARTS = 3  # also how many deaths a request may outlive in the queue


class Deaths:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_digest: dict[str, tuple[int, float]] = {}  # how many in a row, when the last

    def note(self, digest: str) -> None:
        count, last = self._by_digest.get(digest, (0, -math.inf))
        now = self._clock()
        self._by_digest[digest] = (count + 1 if now - last < FORGIVE_S else 1, now)

    def backoff_s(self, digest: str) -> float:
        """The first death costs nothing; each further one within a minute doubles the wait before the next start."""
        count, last = self._by_digest.get(digest, (0, 0.0))
        if count < 2:
            return 0.0
        wait = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** (count - 2))
        return max(0.0, last + wait - self._clock())

    def may_restart(self, digest: str) -> bool:
        return self._by_digest.get(digest, (0, 0.0))[0] <= RESTARTS
