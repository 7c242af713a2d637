"""The worker over a real socket: in a thread with a scripted model for the protocol, as a process with TinyRand and the real model.

Every wait has a deadline (WorkerProcess, Peer); a worker that does not end fails the test instead of hanging it.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.engine import Engine
from engine.errors import OutOfMemory
from engine.types import (
    AbortRequest,
    AddRequest,
    EngineRequest,
    Failed,
    LoadedInfo,
    LoadModel,
    LoadProgress,
    SamplingParams,
    Shutdown,
    StepResult,
    WorkerConfig,
)
from engine.weights.source import open_source
from engine.worker import Build, Progress, serve
from tests.fixtures.scripted_executor import PagedExecutor, ScriptedExecutor, layout_of
from tests.fixtures.tiny_rand import TinyRand, oracle_greedy, tiny_rand
from tests.fixtures.worker_peer import PATIENCE_S, ROOT, Peer, WorkerProcess

GREEDY = SamplingParams(temperature=0.0)
ANY_MODEL = WorkerConfig(model_path="", format="gguf", context_tokens=512)
INFO = LoadedInfo(
    architecture="scripted",
    backend="none",
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    context_tokens=512,
    vocab_size=1000,
    parameters=0,
    weight_bytes=0,
    kv_bytes=0,
    pages_total=100,
    page_tokens=16,
    threads=1,
    load_ms=0.0,
)


def _scripted(executor: ScriptedExecutor) -> Build:
    return lambda config, progress: (Engine(executor, layout_of(None), [100], context_tokens=512), INFO)


class Served(Peer):
    """`serve` in a thread; `status` is what it returned."""

    def __init__(self, build: Build) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.status: int | None = None
        self._thread = threading.Thread(target=self._serve, args=(theirs.detach(), build))
        self._thread.start()

    def _serve(self, fd: int, build: Build) -> None:
        self.status = serve(fd, build)

    def exit_status(self) -> int | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the worker did not end"
        return self.status


@pytest.fixture
def serving() -> Iterator[Callable[[Build], Served]]:
    started: list[Served] = []

    def start(build: Build) -> Served:
        started.append(Served(build))
        return started[-1]

    yield start
    for served in started:
        served.stream.close()
        served.exit_status()


# --- the protocol, with a scripted model -----------------------------------------------------------------------------------------


def test_each_step_is_one_frame_with_every_sequence_in_it(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([5, 6, 7], step_ms=2)))
    assert peer.load(ANY_MODEL) == INFO
    peer.run(*(EngineRequest(id=i, prompt=[1, 2], max_tokens=40) for i in range(4)))
    assert all(peer.tokens[i, 0] == [5, 6] + [7] * 38 for i in range(4))
    assert [result.stats.step for result in peer.steps] == list(range(1, len(peer.steps) + 1))
    assert max(len(result.outputs) for result in peer.steps) == 4


@pytest.mark.timing
def test_a_token_is_on_the_socket_before_the_next_step_ends(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([5], step_ms=50)))
    peer.load(ANY_MODEL)
    peer.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=8)))
    times = []
    while (1, 0) not in peer.ends:
        peer.event()
        times.append(time.monotonic())
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) == 7
    assert min(gaps) > 0.03, "tokens came in bunches"


def test_progress_comes_before_the_answer(serving: Callable[[Build], Served]) -> None:
    def build(config: WorkerConfig, progress: Progress) -> tuple[Engine, LoadedInfo]:
        progress("weights", 0.5)
        return _scripted(ScriptedExecutor([1]))(config, progress)

    peer = serving(build)
    peer.send(LoadModel(ANY_MODEL))
    assert peer.event() == LoadProgress("weights", 0.5)


def test_commands_sent_while_it_loads_are_not_lost(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([3])))
    request = EngineRequest(id=1, prompt=[1], max_tokens=2)
    peer.send(LoadModel(ANY_MODEL), AddRequest(request))
    peer.finish(request)
    assert peer.tokens[1, 0] == [3, 3]


def test_a_request_refused_ends_with_its_error_and_the_next_one_works(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    long, fine = EngineRequest(id=1, prompt=[1] * 600, max_tokens=2), EngineRequest(id=2, prompt=[1], max_tokens=2)
    peer.run(long)
    error = peer.ends[1, 0].error
    assert error is not None and error.code == "context_length_exceeded" and "600" in error.message and "512" in error.message
    peer.run(fine)
    assert peer.ends[2, 0].finish == "length"


def test_an_abort_is_obeyed_within_two_steps_and_confirmed(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([3], step_ms=30)))
    peer.load(ANY_MODEL)
    peer.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=400)))
    while len(peer.tokens.get((1, 0), [])) < 3:
        peer.event()
    peer.send(AbortRequest(1))
    peer.finish(EngineRequest(id=1, prompt=[1], max_tokens=400))
    assert peer.ends[1, 0].finish == "abort"
    assert len(peer.tokens[1, 0]) <= 5


def test_an_idle_worker_takes_no_steps_and_no_time(serving: Callable[[Build], Served]) -> None:
    executor = ScriptedExecutor([3])
    peer = serving(_scripted(executor))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=[1], max_tokens=2))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert len(executor.steps) == 2


def test_a_slow_reader_loses_nothing(serving: Callable[[Build], Served]) -> None:
    executor = PagedExecutor(layout_of(None))
    peer = serving(_scripted(executor))
    peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.load(ANY_MODEL)
    requests = [EngineRequest(id=i, prompt=[i], max_tokens=400) for i in range(3)]
    peer.send(*(AddRequest(request) for request in requests))
    time.sleep(1.0)
    assert 0 < len(executor.steps) < 400, "the worker was not held back, the test shows nothing"
    peer.finish(*requests)
    assert all(peer.tokens[r.id, 0] == executor.expected(r.prompt, 400) for r in requests)


def test_shutdown_ends_it_in_the_middle_even_when_nobody_reads(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(PagedExecutor(layout_of(None))))
    peer.load(ANY_MODEL)
    peer.send(*(AddRequest(EngineRequest(id=i, prompt=[i], max_tokens=500)) for i in range(60)))
    time.sleep(0.5)
    peer.send(Shutdown())
    assert peer.exit_status() == 0
    assert peer.ended() and len(peer.ends) < 60


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello", b"\x00\x00\x00\x00"])
def test_a_malformed_frame_ends_it_with_a_log_line(
    serving: Callable[[Build], Served], raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer = serving(_scripted(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    peer.stream.sendall(raw)
    assert peer.exit_status() == 1
    assert peer.ended()
    assert [record.message for record in caplog.records if "malformed" in record.message]


def test_a_first_frame_that_is_not_a_load_ends_it(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([3])))
    peer.send(AbortRequest(1))
    assert peer.exit_status() == 1


def test_a_second_load_ends_it(serving: Callable[[Build], Served]) -> None:
    peer = serving(_scripted(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    peer.send(LoadModel(ANY_MODEL))
    assert peer.exit_status() == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OutOfMemory("needs 9 GB and 2 are there", hint="buy more"), "out_of_memory", "needs 9 GB and 2 are there"),
        (MemoryError("0x7f001122"), "out_of_memory", "there was not enough memory to load the model"),
        (RuntimeError("secret /home/x at 0x7f001122"), "internal_error", "the model could not be loaded"),
    ],
)
def test_a_load_that_fails_is_told_without_its_inside(
    serving: Callable[[Build], Served], error: Exception, code: str, message: str
) -> None:
    def build(config: WorkerConfig, progress: Progress) -> tuple[Engine, LoadedInfo]:
        raise error

    peer = serving(build)
    failed = peer.load_failure(ANY_MODEL)
    assert (failed.error.code, failed.error.message) == (code, message)
    assert peer.event() is None
    assert peer.exit_status() == 1


def test_an_engine_that_gives_up_ends_its_requests_then_says_so_and_exits(serving: Callable[[Build], Served]) -> None:
    fault = ScriptedExecutor([3], fault=lambda inputs: "lost" if inputs.step >= 4 else None)
    peer = serving(_scripted(fault))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=[1], max_tokens=9, n=2))
    assert len(peer.tokens[1, 0]) == len(peer.tokens[1, 1]) == 3
    assert all(end.finish == "error" and end.error and end.error.code == "engine_error" for end in peer.ends.values())
    failed = peer.event()
    assert isinstance(failed, Failed) and failed.error.code == "engine_error" and "lost" not in failed.error.message
    assert peer.exit_status() == 1


# --- the process -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRand, WorkerConfig]:
    model = tiny_rand(3)
    folder = model.save(tmp_path_factory.mktemp("tiny"))
    return model, WorkerConfig(
        model_path=str(folder),
        format="safetensors",
        dtype="float64",
        kv_dtype="float64",
        context_tokens=256,
        kv_memory_bytes=1 << 22,
        threads=1,
    )


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess() as process:
        yield process


def test_a_real_worker_runs_a_batch_and_unloading_frees_the_process(
    worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig]
) -> None:
    model, config = tiny
    info = worker.load(config)
    assert info.backend == "reference" and info.weight_bytes == sum(t.numel() * 8 for t in model.tensors.values())
    assert info.kv_bytes <= 1 << 22 and info.context_tokens == 256 and info.degraded
    requests = [EngineRequest(id=i, prompt=[i + 1, 7, 9 * i], max_tokens=6 + i, sampling=GREEDY) for i in range(4)]
    worker.run(*requests)
    for request in requests:
        assert worker.tokens[request.id, 0] == oracle_greedy(model, request.prompt, request.max_tokens)
    assert max(result.stats.running for result in worker.steps) >= 3, "they did not share steps"
    worker.send(AddRequest(EngineRequest(id=9, prompt=[5], max_tokens=250, sampling=GREEDY)))
    assert isinstance(worker.event(), StepResult)
    worker.send(AbortRequest(9), AddRequest(again := EngineRequest(id=10, prompt=[1, 7, 0], max_tokens=6, sampling=GREEDY)))
    worker.finish(again)
    assert worker.ends[9, 0].finish == "abort"
    assert worker.tokens[10, 0] == worker.tokens[0, 0]
    worker.send(Shutdown())
    assert worker.exit_status() == 0
    assert not psutil.pid_exists(worker.process.pid)
    assert "Traceback" not in worker.log()


def test_a_killed_worker_is_seen_at_once(worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig]) -> None:
    worker.load(tiny[1])
    worker.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=250)))
    assert isinstance(worker.event(), StepResult)
    worker.process.kill()
    started = time.monotonic()
    assert worker.ended()
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals(worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig], sent: signal.Signals) -> None:
    worker.load(tiny[1])
    worker.process.send_signal(sent)
    if sent == signal.SIGTERM:
        assert worker.exit_status() == -signal.SIGTERM
        return
    worker.run(request := EngineRequest(id=1, prompt=[1, 2], max_tokens=3, sampling=GREEDY))
    assert worker.tokens[1, 0] == oracle_greedy(tiny[0], request.prompt, 3)


def test_it_ends_when_the_daemon_closes_the_socket(worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig]) -> None:
    worker.load(tiny[1])
    worker.send(*(AddRequest(EngineRequest(id=i, prompt=[1], max_tokens=250)) for i in range(8)))
    worker.stream.close()
    assert worker.exit_status() == 0


def test_it_ends_at_once_when_its_parent_is_another_already(worker: WorkerProcess) -> None:
    worker.send(LoadModel(WorkerConfig(model_path="", format="gguf", context_tokens=1, parent_pid=os.getpid() + 1)))
    assert worker.exit_status() == 1


def test_it_ends_with_its_parent_though_the_socket_stays_open(tiny: tuple[TinyRand, WorkerConfig]) -> None:
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    worker = [sys.executable, "-m", "engine.worker", "--fd", str(fd)]
    code = f"import subprocess; subprocess.run({worker}, pass_fds=[{fd}])"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=(fd,))
    try:
        peer = Peer(ours)
        peer.load(msgspec.structs.replace(tiny[1], parent_pid=parent.pid))
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
    finally:
        parent.kill()
        parent.wait(PATIENCE_S)
    with ours, theirs:  # `theirs` is still open here: no end of stream can have told the worker
        assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]


HUNG = """
import os, sys, time
from engine.engine import Engine
from engine.worker import serve
from tests.engine.test_worker import INFO
from tests.fixtures.scripted_executor import ScriptedExecutor, layout_of
executor = ScriptedExecutor([1], fault=lambda inputs: time.sleep(600) if inputs.step > 1 else None)
serve(int(sys.argv[2]), lambda config, progress: (Engine(executor, layout_of(None), [9], context_tokens=64), INFO), os._exit)
"""


def test_a_step_that_takes_for_ever_does_not_keep_it_from_ending() -> None:
    with WorkerProcess((sys.executable, "-c", HUNG)) as worker:
        worker.load(ANY_MODEL)
        worker.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=9)))
        assert isinstance(worker.event(), StepResult)
        time.sleep(0.3)  # into the second step
        worker.send(Shutdown())
        assert worker.exit_status() == 0


def test_a_missing_model_is_a_typed_error_without_traceback_on_the_wire(worker: WorkerProcess, tmp_path: Path) -> None:
    failed = worker.load_failure(WorkerConfig(model_path=str(tmp_path / "none.gguf"), format="gguf", context_tokens=64))
    assert failed.error.code in ("model_not_found", "corrupt_file")
    assert "Traceback" not in failed.error.message
    assert worker.exit_status() == 1


def test_a_cache_that_cannot_fit_is_refused_with_numbers(worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig]) -> None:
    config = WorkerConfig(model_path=tiny[1].model_path, format="safetensors", context_tokens=64, kv_memory_bytes=1 << 50)
    failed = worker.load_failure(config)
    assert failed.error.code == "out_of_memory"
    assert "1125899" in failed.error.message.replace(".", "") and "available" in failed.error.message


def test_the_real_model_answers(worker: WorkerProcess, real_model_path: Path) -> None:
    """Greedy, beside a copy of itself. The prompt is SmolLM2's chat template around "What is the capital of France?"."""
    question = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
    question += [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    info = worker.load(WorkerConfig(model_path=str(real_model_path), format="gguf", context_tokens=256))
    assert info.vocab_size == 49152 and info.weight_bytes > 500e6
    requests = [EngineRequest(id=i, prompt=question, max_tokens=40, sampling=GREEDY, stop_ids=[2], logprobs=0) for i in range(2)]
    worker.run(*requests)
    vocabulary = open_source(str(real_model_path), "gguf").info.vocabulary
    assert vocabulary is not None
    assert worker.tokens[0, 0] == worker.tokens[1, 0]
    assert worker.ends[0, 0].finish == "stop" and worker.ends[0, 0].stop_id == 2
    text = "".join(vocabulary.tokens[token] for token in worker.tokens[0, 0][:-1]).replace("Ġ", " ")
    assert "The capital of France is Paris" in text
    assert "<|" not in text
