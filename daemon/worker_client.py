"""One engine worker process as the daemon sees it: start, load, feed, read, bury.

Owned here: the child process, the socketpair, framing, and which queue an output belongs to. Not here: when to load or unload
(daemon/models.py) and what tokens mean (daemon/generation.py). Invariant: every stream opened here ends, by a finish from the
worker or by an error within a second of its death; a finished or closed stream receives nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from engine.errors import CavectlError, ErrorInfo
from engine.types import (
    MAX_FRAME_BYTES,
    AbortRequest,
    AddRequest,
    Command,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Loaded,
    LoadedInfo,
    LoadModel,
    LoadProgress,
    SequenceOutput,
    Shutdown,
    StepResult,
    WorkerConfig,
)

log = logging.getLogger("cavectl.worker")

EXIT_GRACE_S = 5.0  # after Shutdown, before SIGTERM
TERM_GRACE_S = 2.0  # after SIGTERM, before SIGKILL, or what was allowed before it if that was less ...
KILL_GRACE_S = 0.2  # ... but at least this
REAP_S = 0.5  # how long a closed socket may wait to learn the exit status
LOG_LINE_BYTES = 4096

_HEADER_BYTES = 4
_PACKAGES = str(Path(__file__).resolve().parent.parent)  # where `-m engine.worker` must be found, whatever our folder is


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream into frames. Decodes on arrival, without a task in between: a token waits for nothing."""

    def __init__(self, on_event: Callable[[Event], None], on_close: Callable[[str], None]) -> None:
        self._on_event, self._on_close = on_event, on_close
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._encoder = msgspec.msgpack.Encoder()
        self._transport: asyncio.Transport | None = None
        self._reason = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = self._encoder.encode(command)
            self._transport.write(len(body).to_bytes(_HEADER_BYTES, "little") + body)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for frame in self._frames():
                self._on_event(self._decoder.decode(frame))
        except msgspec.MsgspecError as error:
            self._reason = f"sent a frame that cannot be read ({error})"
            self.close()

    def _frames(self) -> Iterator[bytes]:
        start = 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[start : start + _HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"{size} bytes announced")
            end = start + _HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _HEADER_BYTES : end])
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._on_close(self._reason)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class OutputStream:
    """The outputs of one request, in order. Close it when done: an unfinished request is aborted in the worker."""

    def __init__(self, worker: WorkerClient, request: EngineRequest) -> None:
        self.request = request
        self._worker = worker
        self._queue: asyncio.Queue[SequenceOutput | CavectlError] = asyncio.Queue()
        self._open = set(range(request.n))

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


class WorkerClient:
    """A started worker. `info` is set once it is loaded; `death` once it is gone, with the reason."""

    def __init__(self, process: asyncio.subprocess.Process, on_progress: Callable[[LoadProgress], None]) -> None:
        self.info: LoadedInfo | None = None
        self.stats: EngineStats | None = None
        self.death: CavectlError | None = None
        self.ended = asyncio.Event()
        self.unexpected_end = False
        self._process = process
        self._on_progress = on_progress
        self._protocol = FrameProtocol(self._receive, self._closed)
        self._streams: dict[int, OutputStream] = {}
        self._ids = itertools.count(1)
        self._loading: asyncio.Queue[Event | None] = asyncio.Queue()
        self._failure: ErrorInfo | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self.death is None and not self._stopping

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        config: WorkerConfig,
        *,
        load_timeout_s: float,
        on_progress: Callable[[LoadProgress], None] = lambda _: None,
    ) -> WorkerClient:
        """Start a worker and wait until its model is loaded. Raises its own error, `worker_died` or `worker_timeout`.

        The time-out restarts with each progress frame. Cancelling kills the worker.
        """
        spawning = asyncio.ensure_future(cls._spawn(command, on_progress))
        try:
            worker = await asyncio.shield(spawning)
        except asyncio.CancelledError:  # half a start cannot be undone: finish it, then end it
            with contextlib.suppress(CavectlError):
                await (await spawning).stop(grace_s=0)
            raise
        try:
            worker.send(LoadModel(config))
            await worker._await_loaded(load_timeout_s)
        except BaseException:
            await asyncio.shield(worker.stop(grace_s=0))
            raise
        return worker

    @classmethod
    async def _spawn(cls, command: Sequence[str], on_progress: Callable[[LoadProgress], None]) -> WorkerClient:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise CavectlError(f"cannot start the worker: {error.strerror}", code="worker_died") from error
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a process group of its own: killed as a whole, deaf to the terminal's Ctrl-C
                    cwd=_PACKAGES,
                )
            except OSError as error:
                ours.close()
                raise CavectlError(f"cannot start the worker: {error.strerror}", code="worker_died") from error
        worker = cls(process, on_progress)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker._protocol, sock=ours)
        worker._background(worker._copy_log())
        return worker

    async def _await_loaded(self, timeout_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    event = await self._loading.get()
            except TimeoutError:
                raise CavectlError(
                    f"the model's worker gave no sign of life for {timeout_s:g} s while loading",
                    hint="raise load_timeout_s if the disk is slow",
                    code="worker_timeout",
                ) from None
            match event:
                case LoadProgress():
                    self._on_progress(event)
                case Loaded(info=info):
                    self.info = info
                    return
                case _:
                    await self.ended.wait()
                    assert self.death is not None
                    raise self.death

    # --- requests -------------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, request: EngineRequest) -> OutputStream:
        """Hand a request to the engine. Raises the reason of its death if the worker is gone."""
        if self.death is not None:
            raise self.death
        stream = self._streams[request.id] = OutputStream(self, request)
        self.send(AddRequest(request))
        return stream

    def send(self, command: Command) -> None:
        self._protocol.send(command)

    def forget(self, request: int) -> None:
        self._streams.pop(request, None)

    # --- events ---------------------------------------------------------------------------------------------------------------

    def _receive(self, event: Event) -> None:
        match event:
            case StepResult(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    stream = self._streams.get(output.request)
                    if stream is not None:
                        stream.put(output)
            case Failed(error=error):
                self._failure = error
            case _:
                self._loading.put_nowait(event)

    def _closed(self, reason: str) -> None:
        self._background(self._bury(reason))

    async def _bury(self, reason: str) -> None:
        """The socket is closed, so the process is dead or useless: learn why, make sure, tell everybody."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await self._process.wait()
        status = self._process.returncode
        self._kill(signal.SIGKILL)
        if self._failure is not None:
            self.death = CavectlError.from_info(self._failure)
        else:
            how = reason or _describe_exit(status)
            self.death = CavectlError(
                f"the model's worker {how}",
                hint="the next request starts a new one; `cavectl daemon logs` has its last words",
                code="worker_died",
            )
        self.unexpected_end = not self._stopping
        if self.unexpected_end:
            log.error("worker %d: %s", self.pid, self.death.message)
        self._loading.put_nowait(None)
        for stream in self._streams.values():
            stream.put(self.death)
        self._streams.clear()
        self.ended.set()

    async def _copy_log(self) -> None:
        """Forward what the worker prints, line by line, to the daemon's log."""
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(LOG_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= LOG_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                log.info("worker %d: %s", self.pid, line.decode("utf-8", "replace"))
        if rest:
            log.info("worker %d: %s", self.pid, rest.decode("utf-8", "replace"))

    # --- end ------------------------------------------------------------------------------------------------------------------

    async def stop(self, grace_s: float = EXIT_GRACE_S) -> None:
        """End the process and wait until it is gone. Its remaining requests get `worker_died`. Safe to call twice."""
        self._stopping = True
        self.send(Shutdown())
        if grace_s <= 0 or not await self._gone_within(grace_s):
            self._kill(signal.SIGTERM)
            if not await self._gone_within(max(KILL_GRACE_S, min(TERM_GRACE_S, grace_s))):
                self._kill(signal.SIGKILL)
        await self._process.wait()
        self._protocol.close()
        await self.ended.wait()

    async def _gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _kill(self, number: signal.Signals) -> None:
        """Signal the whole process group, while its leader's id cannot have been reused."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended unexpectedly with status {status}"
