"""When a worker's silence means that it hangs. Counts ticks, never a difference of clocks.

A tick that finds this process late counts once however late it is, so neither a suspended machine nor a stopped daemon is taken for
a worker's silence; a tick that finds the worker itself stopped does not count. Whom to watch and what follows:
daemon/worker_client.py. Invariant: `over` only after `TICKS` ticks in which the worker could have run and this process listened.
"""

from __future__ import annotations

import psutil

TICKS = 20  # in the whole patience
SUSPECT_TICKS = 18  # the last two are for the worker's last words


class Silence:
    """How long one process has been silent. Call `count` every `tick_s`, `heard` when it speaks or need not."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.tick_s = patience_s / TICKS
        self._ticks = 0

    def heard(self) -> None:
        self._ticks = 0

    def count(self, pid: int) -> None:
        if not is_stopped(pid):
            self._ticks += 1

    @property
    def suspect(self) -> bool:
        return self._ticks >= SUSPECT_TICKS

    @property
    def over(self) -> bool:
        return self._ticks >= TICKS


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger. False for one that is gone."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
