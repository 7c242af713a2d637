"""The worker's protocol over a real socketpair, `serve` in a thread with a scripted model: frames, order, refusals, endings.

Every wait has a deadline (Peer); a worker that does not end fails the test instead of hanging it. Processes are in
test_worker_process.py.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from engine.built import Built, EngineOptions, NeedsReload
from engine.errors import OutOfMemory
from engine.runtime.batch import StepInputs
from engine.types import (
    AbortRequest,
    AddRequest,
    EngineRequest,
    Failed,
    Grow,
    Grown,
    LoadedInfo,
    LoadModel,
    LoadProgress,
    Scheduled,
    Shutdown,
    StepResult,
    WorkerConfig,
)
from engine.worker import Build, Progress, serve
from tests.fixtures.scripted_executor import PagedExecutor, ScriptedExecutor, layout_of
from tests.fixtures.worker_peer import ANY_MODEL, INFO, PATIENCE_S, Peer, scripted_build


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


def test_each_step_is_one_frame_with_every_sequence_in_it(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([5, 6, 7], step_ms=2)))
    assert peer.load(ANY_MODEL) == INFO
    peer.run(*(EngineRequest(id=i, prompt=[1, 2], max_tokens=40) for i in range(4)))
    assert all(peer.tokens[i, 0] == [5, 6] + [7] * 38 for i in range(4))
    assert [result.stats.step for result in peer.steps] == list(range(1, len(peer.steps) + 1))
    assert max(len(result.outputs) for result in peer.steps) == 4


@pytest.mark.timing
def test_a_token_is_on_the_socket_before_the_next_step_ends(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([5], step_ms=50)))
    peer.load(ANY_MODEL)
    peer.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=8)))
    times = []
    while (1, 0) not in peer.ends:
        if isinstance(peer.event(), StepResult):
            times.append(time.monotonic())
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) == 7
    assert min(gaps) > 0.03, "tokens came in bunches"


def test_progress_comes_before_the_answer(serving: Callable[[Build], Served]) -> None:
    def build(config: WorkerConfig, progress: Progress) -> Built:
        progress("weights", 0.5)
        return scripted_build(ScriptedExecutor([1]))(config, progress)

    peer = serving(build)
    peer.send(LoadModel(ANY_MODEL))
    assert peer.event() == LoadProgress("weights", 0.5)


def test_commands_sent_while_it_loads_are_not_lost(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3])))
    request = EngineRequest(id=1, prompt=[1], max_tokens=2)
    peer.send(LoadModel(ANY_MODEL), AddRequest(request))
    peer.finish(request)
    assert peer.tokens[1, 0] == [3, 3]


def test_a_request_refused_ends_with_its_error_and_the_next_one_works(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    long, fine = EngineRequest(id=1, prompt=[1] * 600, max_tokens=2), EngineRequest(id=2, prompt=[1], max_tokens=2)
    peer.run(long)
    error = peer.ends[1, 0].error
    assert error is not None and error.code == "context_length_exceeded" and "600" in error.message and "512" in error.message
    peer.run(fine)
    assert peer.ends[2, 0].finish == "length"


def test_an_abort_is_obeyed_within_two_steps_and_confirmed(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3], step_ms=30)))
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
    peer = serving(scripted_build(executor))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=[1], max_tokens=2))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert len(executor.steps) == 2


def test_a_slow_reader_loses_nothing(serving: Callable[[Build], Served]) -> None:
    executor = PagedExecutor(layout_of(None))
    peer = serving(scripted_build(executor))
    peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.load(ANY_MODEL)
    requests = [EngineRequest(id=i, prompt=[i], max_tokens=400) for i in range(3)]
    peer.send(*(AddRequest(request) for request in requests))
    time.sleep(1.0)
    assert 0 < len(executor.steps) < 400, "the worker was not held back, the test shows nothing"
    peer.finish(*requests)
    assert all(peer.tokens[r.id, 0] == executor.expected(r.prompt, 400) for r in requests)


def test_shutdown_ends_it_in_the_middle_even_when_nobody_reads(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(PagedExecutor(layout_of(None))))
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
    peer = serving(scripted_build(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    peer.stream.sendall(raw)
    assert peer.exit_status() == 1
    assert peer.ended()
    assert [record.message for record in caplog.records if "malformed" in record.message]


def test_a_first_frame_that_is_not_a_load_ends_it(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3])))
    peer.send(AbortRequest(1))
    assert peer.exit_status() == 1


def test_a_second_load_ends_it(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3])))
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
    def build(config: WorkerConfig, progress: Progress) -> Built:
        raise error

    peer = serving(build)
    failed = peer.load_failure(ANY_MODEL)
    assert (failed.error.code, failed.error.message) == (code, message)
    assert peer.event() is None
    assert peer.exit_status() == 1


def test_requests_are_named_before_the_step_that_is_their_first(serving: Callable[[Build], Served]) -> None:
    """One at a time, with one sequence at most: each is named once, after the end of the one before and before its own tokens."""
    peer = serving(scripted_build(ScriptedExecutor([3]), max_sequences=1))
    peer.load(ANY_MODEL)
    peer.run(*(EngineRequest(id=i, prompt=[1], max_tokens=3) for i in (7, 5)))
    assert peer.frames == [("scheduled", [7]), *[("step", [7])] * 3, ("scheduled", [5]), *[("step", [5])] * 3]


def test_several_choices_are_one_request(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3]), max_sequences=2))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=[1], max_tokens=2, n=5))
    assert [ids for kind, ids in peer.frames if kind == "scheduled"] == [[1]]


@pytest.mark.timing
def test_the_name_is_on_the_socket_before_the_step_ends(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3], step_ms=300)))
    peer.load(ANY_MODEL)
    sent = time.monotonic()
    peer.send(AddRequest(EngineRequest(id=1, prompt=[1], max_tokens=1)))
    assert isinstance(peer.event(), Scheduled) and time.monotonic() - sent < 0.2
    assert isinstance(peer.event(), StepResult) and time.monotonic() - sent > 0.29


def test_time_waited_before_counts(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=[1], max_tokens=1, waited_ms=5000.0), EngineRequest(id=2, prompt=[1], max_tokens=1))
    waits = [end.usage.queue_ms for _, end in sorted(peer.ends.items()) if end.usage]
    assert 5000 <= waits[0] < 15_000 and waits[1] < 5000


def test_an_idle_worker_does_its_chores_and_tells(serving: Callable[[Build], Served]) -> None:
    """What is cached goes when its time is over, though nobody asks for anything."""
    peer = serving(scripted_build(ScriptedExecutor([3]), options=EngineOptions(rest_retention_s=0.4)))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=list(range(40)), max_tokens=2))
    assert peer.steps[-1].stats.pages_cached >= 2
    told = peer.event()
    assert isinstance(told, StepResult) and told.outputs == [] and told.stats.pages_cached == 0
    peer.run(EngineRequest(id=2, prompt=list(range(40)), max_tokens=2))
    ended = peer.ends[2, 0].usage
    assert ended is not None and ended.cached_tokens == 0


def grown(peer: Served, context_tokens: int) -> Grown:
    peer.send(Grow(context_tokens))
    while True:
        event = peer.event()
        if isinstance(event, Grown):
            return event
        assert isinstance(event, StepResult | Scheduled), event


def test_it_grows_between_steps(serving: Callable[[Build], Served]) -> None:
    def grow(context_tokens: int) -> LoadedInfo:
        if context_tokens > 4096:
            raise OutOfMemory("a context of 9000 tokens needs 9 GB and 2 are free")
        if context_tokens > 2048:
            raise NeedsReload("its RoPE is another")
        return msgspec.structs.replace(INFO, context_tokens=context_tokens, kv_bytes=77)

    peer = serving(scripted_build(ScriptedExecutor([3], step_ms=2), grow=grow))
    peer.load(ANY_MODEL)
    running = EngineRequest(id=1, prompt=[1], max_tokens=200)
    peer.send(AddRequest(running))
    answer = grown(peer, 1024)
    assert (answer.info.context_tokens, answer.info.kv_bytes, answer.error, answer.reload) == (1024, 77, None, False)
    refused = grown(peer, 9000)
    assert refused.error and refused.error.code == "out_of_memory" and "9 GB and 2" in refused.error.message
    assert refused.info == answer.info and not refused.reload
    reload = grown(peer, 4000)
    assert reload.reload and reload.info == answer.info
    peer.finish(running)
    assert peer.tokens[1, 0] == [3] * 200


def test_a_model_that_cannot_grow_says_that_only_a_load_helps(serving: Callable[[Build], Served]) -> None:
    peer = serving(scripted_build(ScriptedExecutor([3])))
    peer.load(ANY_MODEL)
    answer = grown(peer, 1024)
    assert answer.reload and answer.error and answer.info == INFO


def test_a_growth_that_breaks_is_the_end(serving: Callable[[Build], Served]) -> None:
    def grow(context_tokens: int) -> LoadedInfo:
        raise RuntimeError("secret at 0x7f001122")

    peer = serving(scripted_build(ScriptedExecutor([3]), grow=grow))
    peer.load(ANY_MODEL)
    peer.send(Grow(1024))
    failed = peer.event()
    assert isinstance(failed, Failed) and failed.error.code == "engine_error" and "secret" not in failed.error.message
    assert peer.exit_status() == 1


def test_an_engine_that_gives_up_leaves_those_who_wait_untouched(serving: Callable[[Build], Served]) -> None:
    """They are neither named nor ended: the daemon gives them to the next worker."""
    lost: list[int] = []  # from the first step on that has both sequences, however late they arrive

    def fault(inputs: StepInputs) -> str | None:
        lost.extend([inputs.step] if len(inputs.rows) == 2 else [])
        return "lost" if lost else None

    peer = serving(scripted_build(ScriptedExecutor([3], fault=fault, step_ms=1), max_sequences=2))
    peer.load(ANY_MODEL)
    peer.send(*(AddRequest(EngineRequest(id=i, prompt=[1], max_tokens=500)) for i in range(6)))
    while not isinstance(event := peer.event(), Failed):
        assert event is not None
    named = {request for kind, ids in peer.frames if kind == "scheduled" for request in ids}
    assert len(named) == 2 and {request for request, _ in peer.ends} == named
    assert peer.exit_status() == 1


def test_an_engine_that_gives_up_ends_its_requests_then_says_so_and_exits(serving: Callable[[Build], Served]) -> None:
    fault = ScriptedExecutor([3], fault=lambda inputs: "lost" if inputs.step >= 4 else None)
    peer = serving(scripted_build(fault))
    peer.load(ANY_MODEL)
    peer.run(EngineRequest(id=1, prompt=[1], max_tokens=9, n=2))
    assert len(peer.tokens[1, 0]) == len(peer.tokens[1, 1]) == 3
    assert all(end.finish == "error" and end.error and end.error.code == "engine_error" for end in peer.ends.values())
    failed = peer.event()
    assert isinstance(failed, Failed) and failed.error.code == "engine_error" and "lost" not in failed.error.message
    assert peer.exit_status() == 1
