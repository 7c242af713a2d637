"""What every place to get a model from offers: a plan of files with their hashes, and the bytes of each.

Only the seam is here; wheel.py and hub.py implement it, pull.py drives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from daemon.store.partials import Partial, WantedFile

Report = Callable[[int], None]  # bytes of the file that are here
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Plan:
    """One consistent version of a model: `revision` is the same for all files."""

    source: str
    revision: str
    licence: str
    files: tuple[WantedFile, ...]


class Source(Protocol):
    @property
    def extra_bytes(self) -> int:
        """Disk space needed beside the files while they are fetched."""
        ...

    async def plan(self) -> Plan: ...

    async def fetch(self, plan: Plan, wanted: WantedFile, partial: Partial, report: Report) -> None:
        """Appends the missing bytes to `partial`; stops short or raises when it cannot. The caller checks the hash."""
        ...

    def cached(self, wanted: WantedFile) -> list[Path]:
        """Files on this machine that may be the wanted one; not checked."""
        ...


async def in_thread(work: Callable[..., Result], *args: Any) -> Result:
    """Runs blocking file work off the loop. A cancelled caller leaves when the work has ended: nothing touches a file later."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
