"""The outputs of one request on their way from the worker's client to whoever waits for them.

Not here: frames and processes (daemon/worker_client.py), what outputs mean (daemon/generation.py). Invariant: what was put is got
in that order, and nothing follows an error.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from engine.errors import CavectlError
from engine.types import AbortRequest, Command, EngineRequest, SequenceOutput


class Worker(Protocol):
    """What a stream needs of the worker that feeds it."""

    def send(self, command: Command) -> None: ...
    def forget(self, request: int) -> None: ...


class WorkerLost(CavectlError):
    """The worker ended, for the reason said, before it touched this request: another worker may take it."""

    def __init__(self, death: CavectlError) -> None:
        super().__init__(death.message, hint=death.hint, code=death.code)


class OutputStream:
    """The outputs of one request, in order. Close it when done: an unfinished request is aborted in the worker."""

    def __init__(self, worker: Worker, request: EngineRequest) -> None:
        self.request = request
        self.scheduled = False  # a step of the worker has touched it
        self._worker = worker
        self._queue: asyncio.Queue[SequenceOutput | CavectlError] = asyncio.Queue()
        self._open = set(range(request.n))

    @property
    def open(self) -> bool:
        """Whether the worker owes it something."""
        return bool(self._open)

    def put(self, item: SequenceOutput | CavectlError) -> None:
        if isinstance(item, SequenceOutput) and item.finish is not None:
            self._open.discard(item.choice)
        self._queue.put_nowait(item)

    async def get(self) -> SequenceOutput:
        """The next output. Raises the worker's error when it died."""
        item = await self._queue.get()
        if isinstance(item, CavectlError):
            raise item
        return item

    def abort(self, choice: int) -> None:
        """Ask for the end of one choice; its last output follows with finish `abort` unless it ended by itself meanwhile."""
        if choice in self._open:
            self._worker.send(AbortRequest(self.request.id, choice))

    def close(self) -> None:
        if self._open:
            self._worker.send(AbortRequest(self.request.id))
        self._worker.forget(self.request.id)
