"""Loading, keeping and unloading, with real worker processes and invented models."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import cast

import psutil
import pytest

from engine.errors import CavectlError, ModelNotFound
from engine.types import EngineRequest
from tests.daemon.model_bench import Bench, Run, eventually, run
from tests.daemon.scripted import workers

__all__ = ["run"]  # a fixture


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


def test_a_model_that_is_to_go_at_once_can_be_asked_when(run: Run) -> None:
    """uvloop answers call_later(0) with a handle that has no time."""

    async def work(bench: Bench) -> None:
        async with bench.models.lease("a", keep_alive_s=0.0) as model:
            pass
        assert model.expiry is not None and model.expires_in_s == 0.0

    run(work)


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
