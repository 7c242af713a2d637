"""Progress of one file as events: at most ten a second, the first and the last always."""

from __future__ import annotations

import time
from collections.abc import Callable

from daemon.store.manifests import PullEvent

Progress = Callable[[PullEvent], None]
_INTERVAL_S = 0.1


def file_reporter(status: str, name: str, total: int, progress: Progress, digest: str = "") -> Callable[[int], None]:
    """A callback that takes the bytes done so far."""
    last = float("-inf")

    def report(completed: int) -> None:
        nonlocal last
        now = time.monotonic()
        if completed < total and now - last < _INTERVAL_S:
            return
        last = now
        progress(PullEvent(status=status, file=name, total=total, completed=completed, digest=digest))

    return report
