"""Which models are loaded: on demand, one worker each, kept for a while after the last use, least recently used out first.

Owned here: the table of loaded models, who uses them, when they go, what may be loaded beside what, and that a worker which died
is replaced. Not here: how one is loaded (daemon/loading.py), its process (daemon/worker_client.py), the files (daemon/store). All
of it runs on the event loop, so what happens between two awaits is atomic. Invariants: a model in use is never unloaded; a slot
leaves the table before its worker is stopped, so a request finds either a model that stays or none; one load runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from daemon.config import Settings
from daemon.deaths import Deaths
from daemon.loaded_model import LoadedModel
from daemon.loading import TextLoader, context_tokens, start
from daemon.memory import PROCESS_BYTES, Holder, Kept, available_bytes
from daemon.metrics import EngineTotals
from daemon.output_stream import WorkerLost
from daemon.store import ModelRecord
from daemon.worker_client import EXIT_GRACE_S
from engine.errors import CavectlError, OutOfMemory

log = logging.getLogger("cavectl.models")

SHUTDOWN_GRACE_S = 1.0  # for a worker to end by itself when the daemon ends


class Catalogue(Protocol):
    """What is needed of the store."""

    def get(self, name: str) -> ModelRecord: ...


class ModelManager:
    def __init__(
        self,
        settings: Settings,
        store: Catalogue,
        load_text: TextLoader,
        free_bytes: Callable[[list[Holder]], int] = available_bytes,
    ) -> None:
        self._settings = settings
        self._store = store
        self._load_text = load_text
        self._free_bytes = free_bytes
        self._table: dict[str, LoadedModel] = {}  # by digest
        self._leaving: set[LoadedModel] = set()  # out of the table, not gone yet
        self._deaths = Deaths()
        self.totals = EngineTotals()  # of workers that are gone
        self._load_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def loaded(self) -> list[LoadedModel]:
        return list(self._table.values())

    @property
    def healthy(self) -> bool:
        """Whether every model that was loaded can be used, or was unloaded on purpose."""
        return all(model.healthy for model in (*self.loaded, *self._leaving))

    # --- use ------------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str, *, ctx: int | None = None, keep_alive_s: float | None = None) -> AsyncIterator[LoadedModel]:
        """The model, loaded, for the length of the block. Requests for one model share one load.

        For a larger `ctx` than the loaded one the model grows, or, where it cannot, is loaded again once those who use it are done.
        A smaller one binds its own request alone (NativeRequest.context): a model is never loaded with less than those need who
        name none.
        """
        record = await asyncio.to_thread(self._store.get, name)
        wanted = context_tokens(record.info, ctx, self._settings.context_tokens)
        model = await self._acquire(record, wanted, None, keep_alive_s)
        try:
            yield model
        finally:
            self._release(model)

    @asynccontextmanager
    async def lease_next(self, dead: LoadedModel) -> AsyncIterator[LoadedModel]:
        """The same files in the worker that follows the one that died. Raises WorkerLost when that one dies as it loads."""
        try:
            model = await self._acquire(dead.record, dead.context_tokens, dead, None)
        except CavectlError as error:
            if error.code == "worker_died":
                raise WorkerLost(error) from error
            raise
        try:
            yield model
        finally:
            self._release(model)

    async def _acquire(
        self, record: ModelRecord, wanted: int, before: LoadedModel | None, keep_alive_s: float | None
    ) -> LoadedModel:
        """A loaded model with a context of at least `wanted`, counted as used. `before`: the slot that a new one replaces."""
        while True:
            model = self._find_or_load(record, wanted, before)
            model.active += 1
            self._disarm(model)
            if keep_alive_s is not None:
                model.keep_alive_s = keep_alive_s
            try:
                assert model.loading is not None
                await asyncio.shield(model.loading)
                if await self._grow(model, wanted):
                    return model
            except BaseException:
                self._release(model)
                raise
            self._retire(model)
            self._release(model)
            before = model

    def _find_or_load(self, record: ModelRecord, wanted: int, before: LoadedModel | None) -> LoadedModel:
        if self._closed:
            raise _shutting_down()
        present = self._table.get(record.digest)
        if present is not None and present.usable:
            return present
        if present is not None:
            self._retire(present)
        return self._begin(record, wanted, present or before)

    def _begin(self, record: ModelRecord, wanted: int, before: LoadedModel | None) -> LoadedModel:
        """Start to load into a new slot. It inherits from `before`, the slot that it replaces, and waits until that one is gone."""
        kept = Kept(self._settings.backend, self._settings.kv_dtype)
        if before is None:
            model = LoadedModel(record, wanted, self._default_keep_alive_s, kept=kept)
        else:
            restart = before.died or before.restart
            model = LoadedModel(record, max(wanted, before.context_tokens), before.keep_alive_s, kept=kept, restart=restart)
        self.totals.restarts += model.restart
        self._table[record.digest] = model
        predecessors = [other for other in self._leaving if other.record.digest == record.digest]
        model.loading = self._background(self._load(model, predecessors))
        return model

    async def _grow(self, model: LoadedModel, wanted: int) -> bool:
        """See LoadedModel.grow. While memory is short, models that nobody uses give way."""
        while wanted > model.context_tokens:
            try:
                return await model.grow(wanted)
            except CavectlError as error:
                await self._give_way_after(error, model)
        return True

    @property
    def _default_keep_alive_s(self) -> float:
        seconds = self._settings.keep_alive_s
        return math.inf if seconds < 0 else seconds

    def _release(self, model: LoadedModel) -> None:
        model.active -= 1
        model.last_used = time.monotonic()
        self._settle(model)

    def _settle(self, model: LoadedModel) -> None:
        """Nobody uses a model any more: it goes if it must, else its time starts to run."""
        if model.active or model.state == "stopping":
            return
        if model.retired:
            self._stop(model)
        elif model.state == "ready" and model.keep_alive_s != math.inf:
            self._disarm(model)
            model.expires_at = time.monotonic() + model.keep_alive_s
            model.expiry = asyncio.get_running_loop().call_later(model.keep_alive_s, self._expire, model)

    def _disarm(self, model: LoadedModel) -> None:
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None

    def _expire(self, model: LoadedModel) -> None:
        model.expiry = None
        if not model.active and model.state == "ready":
            log.info("model %s was not used for %g s: unloading", model.name, model.keep_alive_s)
            self._stop(model)

    # --- load -----------------------------------------------------------------------------------------------------------------

    async def _load(self, model: LoadedModel, predecessors: list[LoadedModel]) -> None:
        started = time.monotonic()
        try:
            for other in predecessors:
                await other.gone.wait()
            await asyncio.sleep(self._deaths.backoff_s(model.record.digest))
            async with self._load_lock:
                await self._start_in_room(model)
        except BaseException as error:
            self._drop(model)
            self._leaving.discard(model)
            model.gone.set()
            if isinstance(error, CavectlError) and error.code == "worker_died":
                self._after_death(model)
            if isinstance(error, asyncio.CancelledError):  # only by shutdown(); its waiters are not themselves cancelled
                raise _shutting_down() from None
            raise
        model.load_ms = (time.monotonic() - started) * 1e3
        log.info("model %s loaded in %.0f ms, context %d tokens", model.name, model.load_ms, model.context_tokens)
        self._background(self._watch(model))
        self._settle(model)

    async def _start_in_room(self, model: LoadedModel) -> None:
        """Load beside what is loaded. The estimate may be wrong: while the worker says so, models that nobody uses give way."""
        while True:
            free = await self._make_room(model)
            try:
                return await start(model, self._settings, self._load_text, max(0, free - PROCESS_BYTES))
            except CavectlError as error:
                await self._give_way_after(error, model)

    async def _make_room(self, model: LoadedModel) -> int:
        """Unload others, least recently used first, until `model` fits; those in use are let finish first. Gives what is free then.

        Raises OutOfMemory.
        """
        while True:
            for other in [m for m in self._leaving if m.state == "stopping"]:
                await other.gone.wait()
            free = self._free_bytes([m.holder for m in (*self.loaded, *self._leaving) if m.state == "ready"])
            if model.needed_bytes <= free:
                return free
            if finishing := [m for m in self._leaving if m.state == "ready"]:
                await finishing[0].gone.wait()
                continue
            others = self._by_last_use()
            if not others or model.needed_bytes > free + sum(max(m.needed_bytes, m.held_bytes) for m in others):
                raise OutOfMemory(
                    f"{model.name} needs about {model.needed_bytes >> 20} MiB with a context of {model.context_tokens} tokens, "
                    f"{max(0, free) >> 20} MiB are free",
                    hint="choose a smaller context (CAVECTL_CONTEXT_TOKENS, --ctx), unload other models, or choose a smaller model",
                )
            await self._give_way(others[0], model)

    def _by_last_use(self) -> list[LoadedModel]:
        """Models in the order in which they would go: idle ones first, of those the least recently used."""
        return sorted((m for m in self.loaded if m.state == "ready"), key=lambda m: (bool(m.active), m.last_used))

    async def _give_way_after(self, error: CavectlError, model: LoadedModel) -> None:
        """Have the model that was unused for longest make room for `model`, which has too little. Raises `error` if none can."""
        idle = [other for other in self._by_last_use() if not other.active]
        if error.code != "out_of_memory" or not idle:
            raise error
        await self._give_way(idle[0], model)

    async def _give_way(self, other: LoadedModel, model: LoadedModel) -> None:
        log.info("unloading %s to make room for %s", other.name, model.name)
        self._retire(other)
        await other.gone.wait()

    # --- end ------------------------------------------------------------------------------------------------------------------

    async def unload(self, name: str) -> bool:
        """Unload a model once nobody uses it; if nobody does now, then wait until it is gone. False: it was not loaded."""
        record = await asyncio.to_thread(self._store.get, name)
        model = self._table.get(record.digest)
        if model is None:
            return False
        model.keep_alive_s = 0.0
        if not model.active and model.state == "ready":
            self._stop(model)
            await model.gone.wait()
        return True

    def forget(self, name: str) -> None:
        """A model's files were removed or are bad: nobody finds it here any more, those who use it finish."""
        for model in self.loaded:
            if model.name.casefold() == name.casefold():
                self._retire(model)

    async def shutdown(self) -> None:
        """Stop every worker now; what still runs there ends with an error."""
        self._closed = True
        for model in [*self.loaded, *self._leaving]:
            if model.loading is not None and not model.loading.done():
                model.loading.cancel()
            else:
                self._stop(model)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the callbacks that take finished tasks out

    def _retire(self, model: LoadedModel) -> None:
        model.retired = True
        self._drop(model)
        if model.state != "stopping":
            self._leaving.add(model)
        if model.state == "ready":
            self._settle(model)

    def _drop(self, model: LoadedModel) -> None:
        if self._table.get(model.record.digest) is model:
            del self._table[model.record.digest]

    def _stop(self, model: LoadedModel) -> None:
        if model.state != "stopping":
            model.state = "stopping"
            self._disarm(model)
            self._drop(model)
            self._leaving.add(model)
            self._background(self._stop_worker(model))

    async def _stop_worker(self, model: LoadedModel) -> None:
        try:
            await model.worker.stop(SHUTDOWN_GRACE_S if self._closed else EXIT_GRACE_S)
        finally:
            self._leaving.discard(model)
            model.gone.set()

    # --- deaths ---------------------------------------------------------------------------------------------------------------

    async def _watch(self, model: LoadedModel) -> None:
        """A worker that ends unasked takes its slot with it, and the next one starts at once."""
        await model.worker.ended.wait()
        self.totals.add(model.worker)
        if model.died:
            self._stop(model)
            self._after_death(model)

    def _after_death(self, model: LoadedModel) -> None:
        """Bring back a model that was loaded, without waiting to be asked. One that never was is its requests' to try again."""
        digest = model.record.digest
        self._deaths.note(digest)
        lost = (model.died or model.restart) and not model.retired and model.keep_alive_s > 0
        if lost and not self._closed and digest not in self._table and self._deaths.may_restart(digest):
            self._begin(model.record, model.context_tokens, model)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        """A failed load is its waiters' error; without waiters it must not be a complaint about a lost exception."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("background work failed: %s", task.exception())


def _shutting_down() -> CavectlError:
    return CavectlError("the daemon is shutting down", code="shutting_down")
