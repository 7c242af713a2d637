"""A worker that died is replaced by itself: at once the first time, ever more slowly after that, and not for ever."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time

import pytest

from daemon.deaths import BACKOFF_LAST_S, FORGIVE_S, RESTARTS, Deaths
from engine.errors import CavectlError
from engine.types import EngineRequest
from tests.daemon.model_bench import Bench, Run, eventually, run

__all__ = ["run"]  # a fixture


@pytest.mark.timing
def test_killed_while_used_and_started_again(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(scripts=[[10]], repeat=True, every_ms=10)
        async with bench.models.lease("a", keep_alive_s=77) as model:
            stream = model.worker.submit(EngineRequest(id=1, prompt=[1], max_tokens=10**6))
            await stream.get()
            assert bench.models.healthy
            os.kill(model.worker.pid, signal.SIGKILL)
            with pytest.raises(CavectlError, match="killed by signal 9"):
                while True:
                    await stream.get()
            assert not bench.models.healthy
        started = time.monotonic()
        new = await bench.use()
        assert new.worker.pid != model.worker.pid and bench.models.healthy and new.keep_alive_s == 77
        assert time.monotonic() - started < 3, "the first death costs no wait"

    run(work)


def test_killed_while_idle_it_comes_back_unasked_with_the_context_it_had(run: Run) -> None:
    async def work(bench: Bench) -> None:
        model = await bench.use(ctx=512)
        os.kill(model.worker.pid, signal.SIGKILL)
        await eventually(lambda: not bench.models.healthy)
        await eventually(lambda: bench.models.healthy and bench.models.loaded)
        [new] = bench.models.loaded
        assert new is not model and new.context_tokens == 512 and new.restart and bench.models.totals.restarts == 1
        assert new.expiry is not None, "its time runs"

    run(work, context_tokens=256)


@pytest.mark.parametrize("how", ["unloaded", "removed"])
def test_what_was_to_go_does_not_come_back(run: Run, how: str) -> None:
    async def work(bench: Bench) -> None:
        async with bench.models.lease("a") as model:
            if how == "unloaded":
                await bench.models.unload("a")
            else:
                bench.models.forget("a")
            os.kill(model.worker.pid, signal.SIGKILL)
            await eventually(model.gone.is_set)
        await asyncio.sleep(0.05)
        assert bench.loads == 1 and not bench.models.loaded and bench.models.healthy

    run(work)


def test_the_restarts_by_itself_are_bounded(run: Run) -> None:
    async def work(bench: Bench) -> None:
        model = await bench.use()
        bench.plan(load_exit=True)
        os.kill(model.worker.pid, signal.SIGKILL)
        await eventually(lambda: bench.loads == 1 + RESTARTS and not bench.models.loaded)
        await asyncio.sleep(0.3)
        assert bench.loads == 1 + RESTARTS and bench.models.healthy, "nothing is loaded that should work"
        bench.plan()
        await bench.use()

    run(work)


def test_a_load_that_was_never_good_is_not_repeated_by_itself(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(load_exit=True)
        waits = []
        for _ in range(4):
            started = time.monotonic()
            with pytest.raises(CavectlError, match="status 3"):
                await bench.use()
            waits.append(time.monotonic() - started)
        assert waits[2] > 0.4 and waits[3] > 0.9 and bench.loads == 4 and bench.models.healthy
        bench.plan()
        await bench.use()

    run(work)


def test_a_lease_goes_on_to_the_next_worker(run: Run) -> None:
    """Also when the model was removed meanwhile: those who asked for it get it."""

    async def work(bench: Bench) -> None:
        async with bench.models.lease("a") as model:
            bench.models.forget("a")
            os.kill(model.worker.pid, signal.SIGKILL)
            await model.worker.ended.wait()
        async with bench.models.lease_next(model) as new:
            assert new.record is model.record and new.worker.alive

    run(work)


def test_counts_of_workers_that_are_gone_stay(run: Run) -> None:
    async def work(bench: Bench) -> None:
        bench.plan(preemptions=3, evicted_pages=4, accounting_errors=5)
        for _ in range(2):
            async with bench.models.lease("a") as model:
                stream = model.worker.submit(EngineRequest(id=1, prompt=[1], max_tokens=1))
                assert (await stream.get()).finish == "length"
                await bench.models.unload("a")
            await eventually(lambda: not bench.models.loaded)
            await model.gone.wait()
        totals = bench.models.totals
        await eventually(lambda: totals.steps == 2)
        assert (totals.preemptions, totals.evicted_pages, totals.accounting_errors) == (6, 8, 10)
        assert (totals.watchdog_kills, totals.restarts) == (0, 0)

    run(work)


def test_the_waits_of_deaths() -> None:
    now = 1000.0
    deaths = Deaths(lambda: now)
    waits = []
    for _ in range(12):
        waits.append(deaths.backoff_s("x"))
        deaths.note("x")
    assert waits[:5] == [0.0, 0.0, 0.5, 1.0, 2.0] and max(waits) == BACKOFF_LAST_S == waits[-1]
    assert not deaths.may_restart("x") and deaths.may_restart("y") and deaths.backoff_s("y") == 0.0
    now += FORGIVE_S
    deaths.note("x")
    assert deaths.may_restart("x") and deaths.backoff_s("x") == 0.0
    assert math.isfinite(waits[-1])
