"""One download per file in this process, shared by all who want it.

Owns the life of a claimed partial: it is filled by one task however many wait; a waiter that is cancelled leaves the others
alone; the last one to leave stops the task and gives the partial up for a later resume, or drops it when a model took its bytes.
Not here: the bytes' origin (a callback) and the disk (partials.py).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from daemon.store.files import storage_errors
from daemon.store.names import ModelName
from daemon.store.partials import Partial, Partials, WantedFile
from daemon.store.sources import Report, in_thread
from engine.errors import CavectlError

HASH_STEP_BYTES = 16 << 20
Fill = Callable[[Partial, Report], Awaitable[None]]


@dataclass(slots=True)
class _Shared:
    task: asyncio.Task[Partial]
    waiters: list[Report] = field(default_factory=list)
    taken: bool = False
    closing: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return self.closing is None and not failed


class Downloads:
    """The files being fetched now, by content."""

    def __init__(self, partials: Partials) -> None:
        self._partials = partials
        self._shared: dict[str, _Shared] = {}

    @asynccontextmanager
    async def hold(self, wanted: WantedFile, model: ModelName, fill: Fill, report: Report) -> AsyncIterator[Partial]:
        """The finished partial. Leaving without an error means that a model owns the bytes now."""
        shared = await self._join(wanted, model, fill)
        shared.waiters.append(report)
        try:
            yield await asyncio.shield(shared.task)
            shared.taken = True
        finally:
            shared.waiters.remove(report)
            if not shared.waiters:
                shared.closing = asyncio.ensure_future(self._close(wanted.key, shared))
                await asyncio.shield(shared.closing)

    async def _join(self, wanted: WantedFile, model: ModelName, fill: Fill) -> _Shared:
        while (shared := self._shared.get(wanted.key)) is not None:
            if shared.open:
                return shared
            await (asyncio.shield(shared.closing) if shared.closing else asyncio.sleep(0))
        shared = _Shared(asyncio.ensure_future(self._run(wanted, model, fill)))
        self._shared[wanted.key] = shared
        return shared

    async def _close(self, key: str, shared: _Shared) -> None:
        shared.task.cancel()
        await asyncio.wait([shared.task])
        if not shared.task.cancelled() and shared.task.exception() is None:
            partial = shared.task.result()
            await in_thread(partial.drop if shared.taken else partial.release)
        del self._shared[key]

    async def _run(self, wanted: WantedFile, model: ModelName, fill: Fill) -> Partial:
        def report(completed: int) -> None:
            for waiter in tuple(self._shared[wanted.key].waiters):
                waiter(completed)

        with storage_errors(f"store {wanted.name}"):
            partial = self._partials.claim(wanted, model)
            try:
                await self._complete(partial, fill, report)
            except BaseException as error:
                await in_thread(partial.drop if _is_lost(error) else partial.release)
                raise
            return partial

    async def _complete(self, partial: Partial, fill: Fill, report: Report) -> None:
        while await in_thread(partial.hash_more, HASH_STEP_BYTES):
            report(partial.size)
        if partial.resumed and partial.size >= partial.wanted.size and not partial.matches:
            partial.restart()
        resumed = partial.resumed
        if not partial.matches:
            await fill(partial, report)
        if resumed and not partial.matches:  # what was there was bad: once more from the start
            partial.restart()
            await fill(partial, report)
        await in_thread(partial.finish)
        report(partial.size)


def _is_lost(error: BaseException) -> bool:
    """Whether the bytes so far are of no use: bad, or in the way of others on a full disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, CavectlError) and error.code in ("no_space", "hash_mismatch")
