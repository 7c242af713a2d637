"""The worker process: one model, one socket to the daemon, one loop of engine steps.

    socket -> reader thread (only queues) -> [commands] -> step loop -> one StepResult frame per step -> socket

Commands take effect between steps. While the engine has nothing to do the loop sleeps, and wakes for its chores (`Engine.tick`).
Writing blocks: a slow daemon slows the steps and loses no frame. The worker ends when the socket closes, on Shutdown, on SIGTERM or
with its parent, and then finishes nothing. Invariants: a request is named in a `Scheduled` frame before a step touches it; what
goes wrong reaches the daemon as one `Failed` frame with a typed error, a traceback goes to the log only.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine import platform
from engine.built import Built, EngineFailure, NeedsReload
from engine.errors import CavectlError, ErrorInfo
from engine.frames import MalformedFrame, encode_frame, read_frame
from engine.types import (
    AbortRequest,
    AddRequest,
    Command,
    EngineRequest,
    Event,
    Failed,
    Grow,
    Grown,
    Loaded,
    LoadModel,
    LoadProgress,
    Scheduled,
    Shutdown,
    StepResult,
    WorkerConfig,
)

log = logging.getLogger(__name__)

PARENT_POLL_MS = 2000

Progress = Callable[[str, float], None]
Build = Callable[[WorkerConfig, Progress], Built]


@dataclass(frozen=True, slots=True)
class _Ended:
    """Last in the queue: nothing follows. `status` is the exit status."""

    status: int


@dataclass(frozen=True, slots=True)
class _Arrival:
    command: Command
    at: float  # monotonic seconds


class _DaemonGone(Exception):
    """The socket cannot be written: there is nobody to work for."""


def serve(fd: int, build: Build, on_end: Callable[[int], object] | None = None) -> int:
    """Serve one model over the socket `fd` and return the exit status.

    `build(config, progress)` loads it. `on_end(status)` is called from the reader thread the moment the daemon's side ends,
    whatever the loop is at; without it the loop ends after the step it is in.
    """
    with socket.socket(fileno=fd) as stream:
        stream.setblocking(True)
        stream.set_inheritable(False)
        return _Worker(stream, build, on_end).run()


class _Worker:
    def __init__(self, stream: socket.socket, build: Build, on_end: Callable[[int], object] | None) -> None:
        self._stream = stream
        self._build = build
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[_Arrival | _Ended] = queue.SimpleQueue()
        self._parent_pid = 0
        self._leaving = False  # this side ends first

    def run(self) -> int:
        reader = threading.Thread(target=self._read, name="reader", daemon=True)
        reader.start()
        try:
            built = self._load()
            return built if isinstance(built, int) else _Loop(built, self._inbox, self._send).run()
        except _DaemonGone:
            return 0
        finally:
            self._leaving = True
            _shut(self._stream)  # wakes the reader
            reader.join()

    # --- the reader thread ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Queue commands until the stream ends; then wake a loop that sleeps in the queue or in a write."""
        status = 1
        try:
            self._read_commands()
            status = 0
        except MalformedFrame as error:
            log.error("the daemon sent a malformed frame, ending: %s", error)
        except OSError as error:
            log.error("the socket failed, ending: %s", error)
        finally:
            self._inbox.put(_Ended(status))
            _shut(self._stream)
            if self._on_end and not self._leaving:
                self._on_end(status)

    def _read_commands(self) -> None:
        decoder = msgspec.msgpack.Decoder(Command)
        while self._wait_readable():
            command = read_frame(self._stream, decoder)
            if command is None or isinstance(command, Shutdown):
                return
            self._inbox.put(_Arrival(command, time.monotonic()))

    def _wait_readable(self) -> bool:
        """Block until there is something to read. False when the parent is gone, whoever else may hold the other end."""
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        while not poll.poll(PARENT_POLL_MS):
            if platform.parent_gone(self._parent_pid):
                log.info("the daemon is gone, ending")
                return False
        return True

    # --- loading -------------------------------------------------------------------------------------------------------------

    def _load(self) -> Built | int:
        """The model that the first frame asks for, or the exit status when there is none."""
        first = self._inbox.get()
        if isinstance(first, _Ended):
            return first.status
        if not isinstance(first.command, LoadModel):
            log.error("the first frame was not a load, ending")
            return 1
        config = first.command.config
        self._parent_pid = config.parent_pid
        platform.end_with_parent(config.parent_pid)
        try:
            built = self._build(config, self._progress)
        except _DaemonGone:
            raise
        except Exception as error:
            self._send(Failed(_load_error(error)))
            return 1
        self._send(Loaded(built.info))
        return built

    def _progress(self, stage: str, fraction: float) -> None:
        self._send(LoadProgress(stage, fraction))

    def _send(self, event: Event) -> None:
        try:
            self._stream.sendall(encode_frame(event))
        except OSError as error:
            raise _DaemonGone from error


class _Loop:
    """Steps of a loaded engine, and between them what the daemon asks for."""

    def __init__(self, built: Built, inbox: queue.SimpleQueue[_Arrival | _Ended], send: Callable[[Event], None]) -> None:
        self._engine, self._info, self._grow_to = built.engine, built.info, built.grow
        self._inbox, self._send = inbox, send
        self._told = self._engine.stats  # what the daemon knows
        self._engine.on_scheduled = self._tell_scheduled

    def run(self) -> int:
        while (status := self._obey()) is None:
            try:
                result = self._engine.step()
            except EngineFailure as failure:
                self._send(failure.result)
                self._send(Failed(failure.info))
                return 1
            if result is not None:
                self._tell(result)
        return status

    def _obey(self) -> int | None:
        """Carry out what has come, waiting for something when the engine is idle. The exit status when it is the end."""
        while True:
            wanted_s = self._engine.tick(time.monotonic())
            idle = not self._engine.has_work
            if idle and self._engine.stats != self._told:
                self._tell(StepResult([], self._engine.stats))
            try:
                arrival = self._inbox.get(block=idle, timeout=wanted_s)
            except queue.Empty:
                if idle:
                    continue
                return None
            status = self._carry_out(arrival)
            if status is not None:
                return status

    def _carry_out(self, arrival: _Arrival | _Ended) -> int | None:
        if isinstance(arrival, _Ended):
            return arrival.status
        match arrival.command:
            case AddRequest(request):
                self._add(request, arrival.at - request.waited_ms / 1e3)
            case AbortRequest(request, choice):
                self._engine.abort(request, choice)
            case Grow(context_tokens):
                return self._grow(context_tokens)
            case other:
                log.error("unexpected %s, ending", type(other).__name__)
                return 1
        return None

    def _add(self, request: EngineRequest, arrived: float) -> None:
        try:
            self._engine.add(request, arrived)
        except CavectlError as error:
            self._engine.refuse(request, error.info)

    def _grow(self, context_tokens: int) -> int | None:
        """Answer with what holds then. After an exception that is no answer the cache is in an unknown state: that is the end."""
        error = None
        try:
            if self._grow_to is None:
                raise NeedsReload("this model's context is fixed while it is loaded")
            self._info = self._grow_to(context_tokens)
        except CavectlError as refusal:
            error = refusal
        except Exception:
            log.exception("growing the context failed")
            self._send(Failed(ErrorInfo("engine_error", "the engine failed while its context grew", "try again")))
            return 1
        self._send(Grown(self._info, error.info if error else None, isinstance(error, NeedsReload)))
        return None

    def _tell(self, result: StepResult) -> None:
        self._told = result.stats
        self._send(result)

    def _tell_scheduled(self, requests: list[int]) -> None:
        with contextlib.suppress(_DaemonGone):  # not the step's fault; its result finds the same
            self._send(Scheduled(requests))


def _shut(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("the socket was closed already")


def _load_error(error: Exception) -> ErrorInfo:
    """What the daemon may pass on. Anything not meant for a person is logged here and only named there."""
    if isinstance(error, CavectlError):
        log.error("the model cannot be loaded: %s", error.message)
        return error.info
    log.error("loading failed", exc_info=error)
    if isinstance(error, MemoryError):
        return ErrorInfo("out_of_memory", "there was not enough memory to load the model")
    return ErrorInfo("internal_error", "the model could not be loaded", "the daemon's log has the details")


def _build_model(config: WorkerConfig, progress: Progress) -> Built:
    from engine.runtime.load import build_engine  # not before the daemon can be told of its failure

    return build_engine(config, progress)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.worker", description="Serve one model over an inherited socket.")
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of a connected stream socket")
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="worker %(process)d %(levelname)s %(message)s")
    platform.own_signals()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked for by the daemon before it kills a worker that hangs
    return serve(arguments.fd, _build_model, on_end=os._exit)


if __name__ == "__main__":
    sys.exit(main())
