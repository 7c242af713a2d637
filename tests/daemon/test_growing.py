"""A request's larger context: the loaded worker grows where it can, and is loaded again only where nothing else helps."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from engine.errors import CavectlError
from engine.types import EngineRequest
from tests.daemon.model_bench import Bench, Run, eventually, run

__all__ = ["run"]  # a fixture


def asked(bench: Bench) -> list[int]:
    return [event["context"] for event in bench.events("grow")]


def test_it_grows_while_others_run(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(scripts=[[10]], repeat=True, every_ms=5)
        async with bench.models.lease("a", ctx=64) as model:
            assert model.context_tokens == 256, "the default: later requests name none"
            assert await bench.use(ctx=100) is model and await bench.use() is model and not asked(bench)
            stream = model.worker.submit(EngineRequest(id=1, prompt=[1], max_tokens=10**6))
            needed, held = model.needed_bytes, model.held_bytes
            users = await asyncio.gather(*(bench.use(ctx=512) for _ in range(3)), bench.use(ctx=300))
            assert set(users) == {model} and bench.loads == 1 and asked(bench) == [512]
            assert model.context_tokens == 512 and model.needed_bytes > needed
            assert model.held_bytes == held + 256 * 100, "as the worker says, for what is loaded beside it"
            assert model.worker.info is not None and model.worker.info.context_tokens == 512
            for _ in range(50):
                assert (await stream.get()).finish is None
            stream.close()
        with pytest.raises(CavectlError, match=r"2048.*1024") as caught:
            await bench.use(ctx=2048)
        assert caught.value.code == "invalid_request" and asked(bench) == [512]

    run(work, context_tokens=256)


def test_a_larger_one_asked_for_while_it_loads(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_ms=200)
        first = asyncio.create_task(bench.use())
        await eventually(lambda: bench.loads == 1)
        second = await bench.use(ctx=512)
        assert second is await first and second.context_tokens == 512 and bench.loads == 1

    run(work, context_tokens=256)


def test_without_memory_it_is_that_requests_error_and_the_others_run_on(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(scripts=[[10]], repeat=True, every_ms=5, grow="no")
        async with bench.models.lease("a") as model:
            stream = model.worker.submit(EngineRequest(id=1, prompt=[1], max_tokens=10**6))
            with pytest.raises(CavectlError, match="9 GB and 8 GB") as caught:
                await bench.use(ctx=512)
            assert caught.value.code == "out_of_memory" and model.context_tokens == 256
            assert (await stream.get()).finish is None
            stream.close()
        assert await bench.use() is model and bench.loads == 1

    run(work, context_tokens=256)


def test_idle_models_give_way_before_growing_fails(run: Run) -> None:
    async def work(bench: Bench) -> None:
        idle = await bench.use("b")
        bench.plan(grow="no")
        async with bench.models.lease("a"):
            with pytest.raises(CavectlError, match="9 GB"):
                await bench.use("a", ctx=512)
        assert [model.name for model in bench.models.loaded] == ["a"] and not idle.usable and len(asked(bench)) == 2

    run(work, context_tokens=256)


def test_what_only_a_load_can_do_waits_for_the_running(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(grow="reload")
        async with bench.models.lease("a", ctx=64, keep_alive_s=77) as model:
            larger = asyncio.create_task(bench.use(ctx=512))
            await eventually(lambda: asked(bench))
            await asyncio.sleep(0.1)
            assert not larger.done() and model.worker.alive and bench.loads == 1
            joined = asyncio.create_task(bench.use())
        new = await larger
        assert new is not model and new.context_tokens == 512 and await joined is new and new.keep_alive_s == 77
        assert await bench.use(ctx=256) is new and bench.loads == 2 and not new.restart

    run(work, context_tokens=256)


def test_a_client_that_leaves_while_it_grows_disturbs_nobody(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(grow="hang")
        async with bench.models.lease("a") as model:
            leaving = asyncio.create_task(bench.use(ctx=512))
            await eventually(lambda: asked(bench))
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert model.active == 1
            os.kill(model.worker.pid, signal.SIGKILL)
            with pytest.raises(CavectlError):
                await bench.use(ctx=512)

    run(work, context_tokens=256)


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_worker_that_ends_while_it_grows(run: Run, fault: str) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(grow="hang")
        async with bench.models.lease("a") as model:
            growing: asyncio.Task[Any] = asyncio.create_task(bench.use(ctx=512))
            await eventually(lambda: asked(bench))
            if fault == "killed":
                os.kill(model.worker.pid, signal.SIGKILL)
            with pytest.raises(CavectlError) as caught:
                await growing
            assert caught.value.code == ("worker_died" if fault == "killed" else "worker_timeout")

    run(work, context_tokens=256, watchdog_s=30.0 if fault == "killed" else 0.6)
