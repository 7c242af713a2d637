"""The worker as a process of its own, with TinyRand and the real model: what it answers, and everything that ends it.

Every wait has a deadline (WorkerProcess, Peer); a worker that does not end fails the test instead of hanging it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.types import AbortRequest, AddRequest, EngineRequest, LoadModel, SamplingParams, Shutdown, WorkerConfig
from engine.weights.source import open_source
from tests.fixtures.tiny_rand import TinyRand, oracle_greedy, tiny_rand
from tests.fixtures.worker_peer import ANY_MODEL, PATIENCE_S, ROOT, Peer, WorkerProcess

GREEDY = SamplingParams(temperature=0.0)


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
    assert info.kv_bytes <= 1 << 22 and info.context_tokens == 256 and not info.degraded
    requests = [EngineRequest(id=i, prompt=[i + 1, 7, 9 * i], max_tokens=6 + i, sampling=GREEDY) for i in range(4)]
    worker.run(*requests)
    for request in requests:
        assert worker.tokens[request.id, 0] == oracle_greedy(model, request.prompt, request.max_tokens)
    assert max(result.stats.running for result in worker.steps) >= 3, "they did not share steps"
    worker.send(AddRequest(EngineRequest(id=9, prompt=[5], max_tokens=250, sampling=GREEDY)))
    worker.step()
    worker.send(AbortRequest(9), AddRequest(again := EngineRequest(id=10, prompt=[1, 7, 0], max_tokens=6, sampling=GREEDY)))
    worker.finish(again)
    assert worker.ends[9, 0].finish == "abort"
    assert worker.tokens[10, 0] == worker.tokens[0, 0]
    worker.send(Shutdown())
    assert worker.exit_status() == 0
    assert not psutil.pid_exists(worker.process.pid)
    assert "Traceback" not in worker.log()


def test_a_load_without_numpy_logs_no_warning(tiny: tuple[TinyRand, WorkerConfig]) -> None:
    """As it is installed: torch without numpy."""
    without = (
        "import runpy, sys; sys.modules['numpy'] = None; runpy.run_module('engine.worker', run_name='__main__', alter_sys=True)"
    )
    with WorkerProcess((sys.executable, "-c", without)) as worker:
        worker.load(tiny[1])
        worker.send(Shutdown())
        assert worker.exit_status() == 0
        assert "Warning" not in worker.log()


@pytest.mark.timing
def test_a_killed_worker_is_seen_at_once(worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig]) -> None:
    worker.load(tiny[1])
    worker.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=250)))
    worker.step()
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


def test_it_says_where_it_is_when_asked_and_goes_on(worker: WorkerProcess, tiny: tuple[TinyRand, WorkerConfig]) -> None:
    worker.load(tiny[1])
    worker.process.send_signal(signal.SIGUSR1)
    worker.run(request := EngineRequest(id=1, prompt=[1, 2], max_tokens=3, sampling=GREEDY))
    assert worker.tokens[1, 0] == oracle_greedy(tiny[0], request.prompt, 3)
    worker.send(Shutdown())
    assert worker.exit_status() == 0
    log = worker.log()
    assert log.count("(most recent call first)") >= 2 and "in _read" in log and "in main" in log, "all threads, by function"


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
from engine.worker import serve
from tests.fixtures.scripted_executor import ScriptedExecutor
from tests.fixtures.worker_peer import scripted_build
executor = ScriptedExecutor([1], fault=lambda inputs: time.sleep(600) if inputs.step > 1 else None)
serve(int(sys.argv[2]), scripted_build(executor), os._exit)
"""


def test_a_step_that_takes_for_ever_does_not_keep_it_from_ending() -> None:
    with WorkerProcess((sys.executable, "-c", HUNG)) as worker:
        worker.load(ANY_MODEL)
        worker.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=9)))
        worker.step()
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
    """Greedy, beside a copy of itself. The prompt is SmolLM2's chat template around "What is the capital of Germany?"."""
    question = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
    question += [1, 4093, 198, 1780, 314, 260, 3575, 282, 4521, 47, 2, 198, 1, 520, 9531, 198]
    info = worker.load(WorkerConfig(model_path=str(real_model_path), format="gguf", context_tokens=256))
    assert info.vocab_size == 49152 and 90e6 < info.weight_bytes < 100e6, "packed in 4 bits, as the file is"
    requests = [EngineRequest(id=i, prompt=question, max_tokens=40, sampling=GREEDY, stop_ids=[2], logprobs=0) for i in range(2)]
    worker.run(*requests)
    vocabulary = open_source(str(real_model_path), "gguf").info.vocabulary
    assert vocabulary is not None
    assert worker.tokens[0, 0] == worker.tokens[1, 0]
    assert worker.ends[0, 0].finish == "stop" and worker.ends[0, 0].stop_id == 2
    text = "".join(vocabulary.tokens[token] for token in worker.tokens[0, 0][:-1]).replace("Ġ", " ")
    assert "The capital of Germany is Berlin" in text
    assert "<|" not in text
