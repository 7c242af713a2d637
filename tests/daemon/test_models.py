"""Loading, keeping and unloading, with real worker processes and invented models."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import uvloop

from daemon.loaded_model import LoadedModel, TextSide
from daemon.memory import Holder
from daemon.models import ModelManager
from daemon.store import ModelRecord
from engine.errors import CavectlError, ModelNotFound
from engine.types import EngineRequest, ModelInfo
from tests.daemon.process import ROOT
from tests.daemon.scripted import WORKER, workers
from tests.daemon.wire import settings_in

MIB = 1 << 20


def info(context_tokens: int) -> ModelInfo:
    return ModelInfo(
        format="safetensors",
        architecture="llama",
        name="",
        parameters=1000,
        weight_bytes=4000,
        quantization="F32",
        context_tokens=context_tokens,
        embedding_length=64,
        layers=2,
        vocab_size=320,
        config={"num_attention_heads": 4, "num_key_value_heads": 2},
        metadata={},
    )


class Shelf:
    """A store of invented models, by name."""

    def __init__(self, *names: str) -> None:
        self.records = {name: self.record(name) for name in names}

    def record(self, name: str, digest: str = "") -> ModelRecord:
        return ModelRecord(name, digest or f"sha256:{name}", Path("/"), Path("/w"), (), "", "", "", 0.0, info(1024))

    def get(self, name: str) -> ModelRecord:
        if name not in self.records:
            raise ModelNotFound(f"there is no model {name}")
        return self.records[name]


class Bench:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.plan(scripts=[[10, 11, 12]])
        command = shlex.join([sys.executable, str(WORKER), str(folder / "plan.json")])
        self.shelf = Shelf("a", "b", "c")
        self.free = [1 << 40]
        self.text_error: CavectlError | None = None
        self.models = ModelManager(
            settings_in(folder, worker_command=command, **settings), self.shelf, self.load_text, self.free_bytes
        )

    def plan(self, **plan: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps({"log": str(self.folder / "log"), "scripts": [[10]], **plan}))

    def load_text(self, record: ModelRecord) -> TextSide:
        if self.text_error is not None:
            raise self.text_error
        return cast(TextSide, object())

    def free_bytes(self, holders: list[Holder]) -> int:
        """What the invented machine has left: each loaded model takes what it was thought to need."""
        loaded = [m for m in self.models.loaded if m.state == "ready"] if hasattr(self, "models") else []
        return self.free[0] - sum(m.needed_bytes for m in loaded)

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "log"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == kind]

    @property
    def loads(self) -> int:
        return len(self.events("load"))

    async def use(self, name: str = "a", **options: Any) -> LoadedModel:
        async with self.models.lease(name, **options) as model:
            assert model.worker.alive
            return model


Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(work: Callable[[Bench], Awaitable[None]], **settings: Any) -> None:
        async def whole() -> None:
            bench = Bench(tmp_path, **settings)
            try:
                async with asyncio.timeout(60):
                    await work(bench)
            finally:
                await bench.models.shutdown()
            assert not workers(), "a worker is left"

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(whole())

    return run


async def eventually(true: Callable[[], Any], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


def test_concurrent_requests_share_one_load(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_ms=200)
        models = await asyncio.gather(*(bench.use() for _ in range(20)))
        assert len(set(models)) == 1 and bench.loads == 1

    run(work)


def test_unknown_model(run: Run) -> None:
    async def work(bench: Bench) -> None:
        with pytest.raises(ModelNotFound):
            await bench.use("nope")

    run(work)


def test_kept_alive_from_the_end_of_the_last_use(run: Run) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a") as model:
            await asyncio.sleep(0.5)
            assert model.state == "ready" and model.expires_in_s == math.inf
        assert 0 < model.expires_in_s <= 0.301
        await asyncio.sleep(0.15)
        assert await bench.use() is model
        await asyncio.sleep(0.2)
        assert bench.models.loaded == [model]
        await eventually(lambda: not bench.models.loaded and not psutil.pid_exists(model.worker.pid))
        assert await bench.use() is not model and bench.loads == 2

    run(work, keep_alive_s=0.3)


@pytest.mark.parametrize(("keep_alive_s", "stays"), [(0.0, False), (math.inf, True)])
def test_keep_alive_of_a_request(run: Run, keep_alive_s: float, stays: bool) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a", keep_alive_s=keep_alive_s) as model:
            async with bench.models.lease("a"):
                pass
            assert model.usable
        await asyncio.sleep(0.1)
        assert bool(bench.models.loaded) == stays

    run(work)


def test_a_request_at_the_moment_of_expiry_is_served(run: Run) -> None:
    async def work(bench: Bench) -> None:
        for step in range(40):
            async with bench.models.lease("a", keep_alive_s=0.02) as model:
                stream = model.worker.submit(EngineRequest(id=model.worker.next_id(), prompt=[1], max_tokens=2))
                while (await stream.get()).finish is None:
                    pass
            await asyncio.sleep(0.015 + 0.0003 * step)
        assert 1 < bench.loads <= 40

    run(work)


def test_unload(run: Run) -> None:
    async def work(bench: Bench) -> None:
        await bench.models.unload("a")
        async with bench.models.lease("a") as model:
            await bench.models.unload("a")
            assert model.worker.alive, "in use"
        await eventually(lambda: not psutil.pid_exists(model.worker.pid))
        model = await bench.use()
        await bench.models.unload("a")
        assert not psutil.pid_exists(model.worker.pid) and not bench.models.loaded

    run(work)


def test_never_loaded_with_less_than_the_default_and_a_larger_one_waits_for_the_running(run: Run) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a", ctx=64) as model:
            assert model.context_tokens == 256, "the default: later requests name none"
            assert await bench.use(ctx=100) is model and await bench.use() is model
            larger = asyncio.create_task(bench.use(ctx=512))
            await asyncio.sleep(0.3)
            assert not larger.done() and model.worker.alive and bench.loads == 1
            joined = asyncio.create_task(bench.use())
        assert (await larger).context_tokens == 512 and await joined is larger.result()
        assert await bench.use(ctx=256) is larger.result() and bench.loads == 2
        with pytest.raises(CavectlError, match=r"2048.*1024") as caught:
            await bench.use(ctx=2048)
        assert caught.value.code == "invalid_request"

    run(work, context_tokens=256)


def test_least_recently_used_makes_room(run: Run) -> None:
    async def work(bench: Bench) -> None:
        one = (await bench.use("a")).needed_bytes
        bench.free[0] = int(2.5 * one)
        await bench.use("b")
        await bench.use("a")
        await bench.use("c")
        assert [m.name for m in bench.models.loaded] == ["a", "c"]
        bench.free[0] = one // 2
        with pytest.raises(CavectlError, match="MiB") as caught:
            await bench.use("b")
        assert caught.value.code == "out_of_memory"
        assert (await bench.use("a")).worker.alive

    run(work)


def test_idle_models_give_way_when_the_worker_finds_too_little(run: Run) -> None:
    """The estimate said that it fits; the worker, which measures, did not: idle models go, and then it is final."""

    async def work(bench: Bench) -> None:
        await bench.use("a")
        bench.plan(load_error={"code": "out_of_memory", "message": "no"})
        with pytest.raises(CavectlError, match="no") as caught:
            await bench.use("b")
        assert caught.value.code == "out_of_memory" and bench.models.loaded == [] and bench.loads == 3
        bench.plan()
        async with bench.models.lease("a") as model:
            bench.plan(load_error={"code": "out_of_memory", "message": "no"})
            with pytest.raises(CavectlError, match="no"):
                await bench.use("b")
            assert bench.models.loaded == [model] and model.worker.alive

    run(work)


def test_a_model_in_use_is_waited_for_not_unloaded(run: Run) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a") as model:
            bench.free[0] = int(1.5 * model.needed_bytes)
            other = asyncio.create_task(bench.use("b"))
            await asyncio.sleep(0.3)
            assert model.worker.alive and not other.done()
        assert (await other).name == "b"
        await eventually(lambda: [m.name for m in bench.models.loaded] == ["b"])

    run(work)


def test_two_models_alternating_over_the_memory_budget(run: Run) -> None:
    """50 switches, several askers at once: all are served, and nothing is left behind."""

    async def work(bench: Bench) -> None:
        bench.free[0] = int(1.5 * (await bench.use("a")).needed_bytes)
        await asyncio.gather(*(bench.use("ab"[i % 2]) for i in range(16)))
        for i in range(10):
            await bench.use("ab"[i % 2])
        assert len(bench.models.loaded) == 1

    run(work)


@pytest.mark.timing
def test_killed_while_used_and_started_again(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(scripts=[[10]], repeat=True, every_ms=10)
        async with bench.models.lease("a") as model:
            stream = model.worker.submit(EngineRequest(id=1, prompt=[1], max_tokens=10**6))
            await stream.get()
            os.kill(model.worker.pid, signal.SIGKILL)
            with pytest.raises(CavectlError, match="killed by signal 9"):
                while True:
                    await stream.get()
        started = time.monotonic()
        assert (await bench.use()).worker.pid != model.worker.pid
        assert time.monotonic() - started < 3, "the first death costs no wait"

    run(work)


def test_a_worker_that_dies_again_and_again_is_started_ever_more_slowly(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_exit=True)
        waits = []
        for _ in range(4):
            started = time.monotonic()
            with pytest.raises(CavectlError, match="status 3"):
                await bench.use()
            waits.append(time.monotonic() - started)
        assert waits[2] > 0.4 and waits[3] > 0.9
        bench.plan()
        await bench.use()

    run(work)


def test_load_failures_leave_nothing_and_the_next_request_tries_again(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_error={"code": "unsupported_model", "message": "no"})
        results = await asyncio.gather(*(bench.use() for _ in range(5)), return_exceptions=True)
        assert [cast(CavectlError, r).code for r in results] == ["unsupported_model"] * 5
        assert bench.loads == 1 and not bench.models.loaded
        bench.plan()
        bench.text_error = CavectlError("no tokenizer", code="unsupported_tokenizer")
        with pytest.raises(CavectlError, match="no tokenizer"):
            await bench.use()
        await eventually(lambda: not workers())
        bench.text_error = None
        await bench.use()

    run(work)


def test_a_waiter_that_leaves_does_not_end_the_load(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_ms=400)
        first, second = asyncio.create_task(bench.use()), asyncio.create_task(bench.use())
        await eventually(lambda: bench.loads == 1)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert (await second).usable and bench.loads == 1

    run(work)


def test_removed_while_used(run: Run) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a") as model:
            del bench.shelf.records["a"]
            bench.models.forget("A")
            assert not bench.models.loaded and model.worker.alive
            with pytest.raises(ModelNotFound):
                await bench.use()
        await eventually(lambda: not psutil.pid_exists(model.worker.pid))

    run(work)


def test_replaced_by_a_new_pull(run: Run) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a") as model:
            bench.shelf.records["a"] = bench.shelf.record("a", "sha256:new")
            newer = await bench.use()
            assert newer is not model and newer.record.digest == "sha256:new" and model.worker.alive

    run(work)


def test_shutdown_ends_loads_and_refuses_requests(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_hang=True)
        waiting = asyncio.create_task(bench.use())
        await eventually(lambda: bench.loads == 1)
        await bench.models.shutdown()
        for request in (waiting, bench.use("b")):
            with pytest.raises(CavectlError) as caught:
                await request
            assert caught.value.code == "shutting_down"

    run(work)


def test_shutdown_stops_what_is_out_of_the_table_too(run: Run) -> None:
    async def work(bench: Bench) -> None:
        lease = bench.models.lease("a")
        model = await lease.__aenter__()
        bench.models.forget("A")
        await bench.models.shutdown()
        assert not psutil.pid_exists(model.worker.pid)
        await lease.__aexit__(None, None, None)

    run(work)
