"""One engine worker process as the daemon sees it: start, load, feed, read, watch, bury.

Owned here: the child process, the socketpair, which stream an output belongs to, and the end of a worker that hangs. Not here: when
to load or unload (daemon/models.py) and what tokens mean (daemon/generation.py). Invariants: every stream opened here ends, by a
finish from the worker or by an error within a second of its death; a finished or closed stream receives nothing more; the error
is WorkerLost only if no step of the worker touched the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from daemon.output_stream import OutputStream, WorkerLost
from daemon.watchdog import SUSPECT_TICKS, Silence
from daemon.worker_frames import FrameProtocol
from engine.errors import CavectlError, ErrorInfo
from engine.types import (
    AddRequest,
    Command,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Grow,
    Grown,
    Loaded,
    LoadedInfo,
    LoadModel,
    LoadProgress,
    Scheduled,
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

_PACKAGES = str(Path(__file__).resolve().parent.parent)  # where `-m engine.worker` must be found, whatever our folder is


class WorkerClient:
    """A started worker. `info` and `stats` are set once it is loaded; `death` once it is gone, with the reason."""

    def __init__(self, process: asyncio.subprocess.Process, on_progress: Callable[[LoadProgress], None]) -> None:
        self.info: LoadedInfo | None = None
        self.stats: EngineStats | None = None
        self.death: CavectlError | None = None
        self.ended = asyncio.Event()
        self.unexpected_end = False
        self.hung = False  # killed for its silence
        self._process = process
        self._on_progress = on_progress
        self._protocol = FrameProtocol(self._receive, self._closed)
        self._streams: dict[int, OutputStream] = {}
        self._growing: deque[asyncio.Future[Grown]] = deque()
        self._silence: Silence | None = None  # from the moment it is loaded
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

    @property
    def suspect(self) -> bool:
        """It has been silent for so long that it probably hangs, or it is dead."""
        return self.unexpected_end or (self._silence is not None and self._silence.suspect)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        config: WorkerConfig,
        *,
        load_timeout_s: float,
        watchdog_s: float,
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
            worker._background(worker._guard(watchdog_s))
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
            match await self._loading_event(Silence(timeout_s)):
                case LoadProgress() as progress:
                    self._on_progress(progress)
                case Loaded(info=info):
                    self.info, self.stats = info, _at_rest(info)
                    return
                case _:
                    await self.ended.wait()
                    assert self.death is not None
                    raise self.death

    async def _loading_event(self, silence: Silence) -> Event | None:
        while not silence.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence.tick_s):
                    return await self._loading.get()
            silence.count(self.pid)
        raise CavectlError(
            f"the model's worker gave no sign of life for {silence.patience_s:g} s while loading",
            hint="raise load_timeout_s if the disk is slow",
            code="worker_timeout",
        )

    # --- requests -------------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, request: EngineRequest) -> OutputStream:
        """Hand a request to the engine. Raises WorkerLost if the worker is gone."""
        if self.death is not None:
            raise WorkerLost(self.death)
        stream = self._streams[request.id] = OutputStream(self, request)
        self.send(AddRequest(request))
        return stream

    async def grow(self, context_tokens: int) -> Grown:
        """Ask for longer sequences; `info` holds what is so afterwards. Raises WorkerLost."""
        if self.death is not None:
            raise WorkerLost(self.death)
        answer: asyncio.Future[Grown] = asyncio.get_running_loop().create_future()
        self._growing.append(answer)
        self.send(Grow(context_tokens))
        return await answer

    def send(self, command: Command) -> None:
        self._protocol.send(command)

    def forget(self, request: int) -> None:
        self._streams.pop(request, None)

    # --- events ---------------------------------------------------------------------------------------------------------------

    def _receive(self, event: Event) -> None:
        if self._silence is not None:
            self._silence.heard()
        match event:
            case StepResult(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    self._hand_out(output)
            case Scheduled(requests=requests):
                for stream in filter(None, map(self._streams.get, requests)):
                    stream.scheduled = True
            case Grown():
                self.info = event.info
                answer = self._growing.popleft()
                if not answer.done():
                    answer.set_result(event)
            case Failed(error=error):
                self._failure = error
            case _:
                self._loading.put_nowait(event)

    def _hand_out(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.request)
        if stream is not None:
            stream.scheduled = True
            stream.put(output)

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
        self._tell_end(self.death)
        self.ended.set()

    def _tell_end(self, death: CavectlError) -> None:
        self._loading.put_nowait(None)
        for stream in self._streams.values():
            stream.put(death if stream.scheduled else WorkerLost(death))
        self._streams.clear()
        for answer in self._growing:
            if not answer.done():
                answer.set_exception(WorkerLost(death))
        self._growing.clear()

    # --- watching -------------------------------------------------------------------------------------------------------------

    async def _guard(self, patience_s: float) -> None:
        """Kill a worker that owes somebody an answer and says nothing for `patience_s`; before that, have it say where it is."""
        silence = self._silence = Silence(patience_s)
        while not self.ended.is_set():
            await asyncio.sleep(silence.tick_s)
            if not (self._growing or any(stream.open for stream in self._streams.values())):
                silence.heard()
                continue
            suspected = silence.suspect
            silence.count(self.pid)
            if silence.over:
                self._end_hung(patience_s)
                return
            if silence.suspect and not suspected:
                log.error("worker %d has been silent for %g s: asking where it is", self.pid, SUSPECT_TICKS * silence.tick_s)
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGUSR1)  # it alone: a child of its would die of it

    def _end_hung(self, patience_s: float) -> None:
        self.hung = True
        self._failure = ErrorInfo(
            "worker_timeout",
            f"the model's worker hung: it was silent for {patience_s:g} s and was killed",
            "try again; `cavectl daemon logs` shows where it hung, and watchdog_s is the patience",
        )
        log.error("worker %d has been silent for %g s: killing it", self.pid, patience_s)
        self._kill(signal.SIGKILL)
        self._protocol.close()  # whatever keeps a killed process from ending keeps nobody waiting here

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


def _at_rest(info: LoadedInfo) -> EngineStats:
    """The state of an engine that has not made a step."""
    return EngineStats(
        step=0,
        step_ms=0.0,
        running=0,
        waiting=0,
        prefill_tokens=0,
        decode_tokens=0,
        pages_total=info.pages_total,
        pages_used=0,
        pages_cached=0,
        pages_pinned=0,
    )


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"ended unexpectedly with status {status}"
