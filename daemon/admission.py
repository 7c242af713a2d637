"""How many requests may wait. Past the bound a new one is refused at once, with a guess of when to try again.

A request waits from its arrival to its first token (loading, tokenising, the engine's own queue); one that streams is not counted.
Not here: the order in which the engine serves those that wait (engine/scheduler), or who may connect (daemon/protocol.py).
Invariant: every ticket is given back exactly once, however its request ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from daemon.api.errors import Busy

LONGEST_RETRY_S = 60
_SMOOTHING = 0.2  # weight of the newest wait in the running mean


class Ticket:
    """A place among those that wait, kept until `served` or the end of the request."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._arrived = admission.clock()
        self._waiting = True

    def served(self) -> None:
        """The request has its first token: it waits no longer."""
        if self._waiting:
            self._waiting = False
            self._admission.leave(self._arrived)


class Admission:
    def __init__(self, max_queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_queue = max_queue
        self.waiting = 0
        self.active = 0
        self.clock = clock
        self._mean_wait_s = 1.0

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """Raises Busy (`queue_full`) when `max_queue` requests wait already."""
        if self.waiting >= self.max_queue:
            raise Busy(
                f"the queue is full: {self.waiting} requests wait",
                hint="try again later, or raise max_queue",
                retry_after_s=min(LONGEST_RETRY_S, math.ceil(self._mean_wait_s)),
            )
        self.waiting += 1
        self.active += 1
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            ticket.served()
            self.active -= 1

    def leave(self, arrived: float) -> None:
        self.waiting -= 1
        self._mean_wait_s += _SMOOTHING * (self.clock() - arrived - self._mean_wait_s)
