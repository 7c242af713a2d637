"""The worker's life seen from the daemon, with a real process on the other end of the socketpair."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import uvloop

from daemon.output_stream import WorkerLost
from daemon.worker_client import WorkerClient
from daemon.worker_frames import FrameProtocol
from engine.errors import CavectlError, ErrorInfo
from engine.types import EngineRequest, EngineStats, Event, LoadProgress, Shutdown, StepResult, WorkerConfig
from tests.daemon.process import ROOT
from tests.daemon.scripted import WORKER, workers


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[WorkerClient]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def start(
        timeout_s: float = 20, watchdog_s: float = 20, on_progress: Callable[[LoadProgress], None] = lambda _: None, **plan: Any
    ) -> WorkerClient:
        path = tmp_path / "plan.json"
        path.write_bytes(msgspec.json.encode({"scripts": [[]]} | plan))
        config = WorkerConfig(model_path="/nowhere", format="gguf", context_tokens=64)
        command = [sys.executable, str(WORKER), str(path)]
        return await WorkerClient.start(command, config, load_timeout_s=timeout_s, watchdog_s=watchdog_s, on_progress=on_progress)

    return start


async def read_all(worker: WorkerClient, request: EngineRequest) -> list[int]:
    stream, tokens = worker.submit(request), []
    while True:
        output = await stream.get()
        tokens += [t.id for t in output.tokens]
        if output.finish:
            return tokens


def request(worker: WorkerClient, **fields: Any) -> EngineRequest:
    return EngineRequest(id=worker.next_id(), prompt=[1, 2], **{"max_tokens": 50} | fields)


def test_outputs_reach_their_own_request(start: Any) -> None:
    async def work() -> None:
        seen: list[LoadProgress] = []
        worker = await start(scripts=[[10, 11, 12], [20, 21]], on_progress=seen.append)
        assert worker.info is not None and worker.info.context_tokens == 64
        assert [p.fraction for p in seen] == [0.0, 0.2, 0.4, 0.6, 0.8]
        results = await asyncio.gather(*(read_all(worker, request(worker)) for _ in range(6)))
        assert results == [[10, 11, 12], [20, 21]] * 3
        await worker.stop()

    run(work())


@pytest.mark.timing
def test_killed_worker_fails_all_its_requests_within_a_second(start: Any) -> None:
    async def work() -> None:
        worker = await start(scripts=[[10]], repeat=True, every_ms=20)
        streams = [worker.submit(request(worker, max_tokens=10**6)) for _ in range(4)]
        await asyncio.gather(*(s.get() for s in streams))
        killed = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(CavectlError, match="killed by signal 9") as caught:
                while True:
                    await stream.get()
            assert caught.value.code == "worker_died" and caught.value.hint
        assert time.monotonic() - killed < 1
        with pytest.raises(CavectlError, match="killed"):
            worker.submit(request(worker))

    run(work())


def test_a_failed_frame_is_the_reason_given(start: Any) -> None:
    async def work() -> None:
        worker = await start(scripts=[[10]], repeat=True, raise_at=2, max_running=1)
        running, waiting = worker.submit(request(worker)), worker.submit(request(worker))
        while (output := await running.get()).finish is None:
            pass
        assert output.error is not None and output.error.code == "engine_error"
        with pytest.raises(WorkerLost) as caught:
            await waiting.get()
        assert caught.value.code == "engine_error"
        await worker.ended.wait()
        assert worker.death is not None and worker.death.code == "engine_error" and not worker.hung

    run(work())


@pytest.mark.timing
def test_a_silent_worker_is_killed_only_while_it_owes_something(start: Any) -> None:
    """A stream that nobody has closed yet, because its client reads slowly, is no debt once its last output is here."""

    async def work() -> None:
        worker = await start(scripts=[[10]], watchdog_s=0.6, hang_at=2)
        stream = worker.submit(request(worker))
        while (await stream.get()).finish is None:
            pass
        await asyncio.sleep(1.2)
        assert worker.alive and not worker.suspect
        hung = worker.submit(request(worker))
        asked = time.monotonic()
        with pytest.raises(CavectlError) as caught:
            while True:
                await hung.get()
        assert caught.value.code == "worker_timeout" and not isinstance(caught.value, WorkerLost) and worker.hung and worker.suspect
        assert 0.5 < time.monotonic() - asked < 1.0
        with pytest.raises(WorkerLost):
            worker.submit(request(worker))

    run(work())


def test_load_failures(start: Any) -> None:
    async def work() -> None:
        error = ErrorInfo("unsupported_model", "no such architecture", "hint")
        with pytest.raises(CavectlError, match="no such architecture") as caught:
            await start(load_error=msgspec.to_builtins(error))
        assert caught.value.info == error
        with pytest.raises(CavectlError, match="ended unexpectedly with status 3"):
            await start(load_exit=True)
        with pytest.raises(CavectlError, match="no sign of life for 1 s") as caught:
            await start(load_hang=True, timeout_s=1)
        assert caught.value.code == "worker_timeout"
        assert not workers()

    run(work())


def test_a_command_that_cannot_start() -> None:
    async def work() -> None:
        config = WorkerConfig(model_path="/nowhere", format="gguf", context_tokens=64)
        with pytest.raises(CavectlError, match="cannot start the worker"):
            await WorkerClient.start(["/nonexistent/worker"], config, load_timeout_s=5, watchdog_s=5)

    run(work())


def test_cancelled_load_leaves_no_process(start: Any) -> None:
    async def work() -> None:
        task = asyncio.create_task(start(load_hang=True))
        while not workers():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not workers()

    run(work())


@pytest.mark.parametrize("hang", [False, True])
def test_stop_frees_the_process_and_its_descriptors(start: Any, hang: bool) -> None:
    async def work() -> None:
        before = psutil.Process().num_fds()
        worker = await start(scripts=[[10]], repeat=True, hang_at=0 if hang else -1)
        stream = worker.submit(request(worker))
        await asyncio.sleep(0.1)
        await worker.stop(grace_s=0.3)
        assert not psutil.pid_exists(worker.pid)
        with pytest.raises(CavectlError):
            while True:
                await stream.get()
        await asyncio.sleep(0.05)
        assert psutil.Process().num_fds() <= before + 1  # the loop's own child watcher may stay

    run(work())


def test_closing_an_unfinished_stream_aborts_it(start: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def work() -> None:
        worker = await start(scripts=[[10]], repeat=True, every_ms=20, log=str(log))
        unfinished, finished = worker.submit(request(worker)), request(worker, max_tokens=1)
        await unfinished.get()
        unfinished.close()
        assert await read_all(worker, finished) == [10]
        await worker.stop()

    run(work())
    aborted = [line["request"] for line in map(msgspec.json.decode, log.read_bytes().splitlines()) if line["event"] == "abort"]
    assert aborted == [1]


def frames(events: list[Event]) -> bytes:
    bodies = [msgspec.msgpack.encode(event) for event in events]
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 64, 10**6])
def test_frames_are_whole_however_the_bytes_arrive(cut: int) -> None:
    stats = EngineStats(
        step=1,
        step_ms=1,
        running=1,
        waiting=0,
        prefill_tokens=0,
        decode_tokens=1,
        pages_total=1,
        pages_used=1,
        pages_cached=0,
        pages_pinned=0,
    )
    sent: list[Event] = [LoadProgress("weights", k / 7) for k in range(7)] + [StepResult([], stats)]
    seen: list[Event] = []
    protocol = FrameProtocol(seen.append, lambda _: None)
    data = frames(sent)
    for start in range(0, len(data), cut):
        protocol.data_received(data[start : start + cut])
    assert seen == sent


@pytest.mark.parametrize("more", [False, True])
def test_what_a_worker_sent_before_it_ended_is_read(more: bool) -> None:
    """Also when its end is noticed first by a command that cannot be written any more. `more`: than one read holds."""
    sent: list[Event] = [LoadProgress("weights" * (1000 if more else 1), k / 20) for k in range(20)]

    async def work() -> None:
        seen: list[Event] = []
        closed = asyncio.Event()
        protocol = FrameProtocol(seen.append, lambda _: closed.set())
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=ours)
        protocol.send(Shutdown())
        await asyncio.sleep(0)  # it is written, and never read
        theirs.sendall(frames(sent))
        theirs.close()
        protocol.send(Shutdown())
        await closed.wait()
        assert seen == sent

    run(work())
