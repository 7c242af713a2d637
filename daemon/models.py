"""Which models are loaded: on demand, one worker each, kept for a while after the last use, least recently used out first.

Owned here: the table of loaded models, who uses them, when they go, and what may be loaded beside what. Not here: the worker's
process (daemon/worker_client.py), the files (daemon/store). All of it runs on the event loop, so what happens between two awaits is
atomic. Invariants: a model in use is never unloaded; a slot leaves the table before its worker is stopped, so a request finds
either a model that stays or none; one load runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from daemon.config import Settings
from daemon.interpreter import python_module
from daemon.loaded_model import LoadedModel, TextSide
from daemon.memory import PROCESS_BYTES, Holder, available_bytes
from daemon.store import ModelRecord
from daemon.worker_client import EXIT_GRACE_S, WorkerClient
from engine.errors import CavectlError, InvalidRequest, OutOfMemory
from engine.types import LoadProgress, ModelInfo, WorkerConfig

log = logging.getLogger("cavectl.models")

DEFAULT_CONTEXT_TOKENS = 8192
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.5, 30.0
SHUTDOWN_GRACE_S = 1.0  # for a worker to end by itself when the daemon ends
FORGIVE_S = 60.0  # a death this long after the one before it counts as the first


class Catalogue(Protocol):
    """What is needed of the store."""

    def get(self, name: str) -> ModelRecord: ...


class TextLoader(Protocol):
    """Reads a model's tokenizer and chat template; runs on a thread."""

    def __call__(self, record: ModelRecord) -> TextSide: ...


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
        self._deaths: dict[str, tuple[int, float]] = {}  # by digest: how many in a row, when the last
        self._load_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def loaded(self) -> list[LoadedModel]:
        return list(self._table.values())

    # --- use ------------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str, *, ctx: int | None = None, keep_alive_s: float | None = None) -> AsyncIterator[LoadedModel]:
        """The model, loaded, for the length of the block. Requests for one model share one load.

        A larger `ctx` than the loaded one brings a reload, once those who use the old one are done. A smaller one binds its own
        request alone (NativeRequest.context): a model is never loaded with less than those need who name none.
        """
        record = await asyncio.to_thread(self._store.get, name)
        model = self._find_or_load(record, ctx)
        model.active += 1
        self._disarm(model)
        if keep_alive_s is not None:
            model.keep_alive_s = keep_alive_s
        try:
            assert model.loading is not None
            await asyncio.shield(model.loading)
            yield model
        finally:
            self._release(model)

    def _find_or_load(self, record: ModelRecord, ctx: int | None) -> LoadedModel:
        if self._closed:
            raise _shutting_down()
        wanted = _context_tokens(record.info, ctx, self._settings.context_tokens)
        present = self._table.get(record.digest)
        if present is not None and present.usable and wanted <= present.context_tokens:
            return present
        if present is not None:
            wanted = max(wanted, present.context_tokens)
            self._retire(present)
        keep_alive_s = present.keep_alive_s if present is not None else self._default_keep_alive_s
        model = self._table[record.digest] = LoadedModel(record, wanted, keep_alive_s)
        model.loading = self._background(self._load(model, present))
        return model

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

    async def _load(self, model: LoadedModel, predecessor: LoadedModel | None) -> None:
        started = time.monotonic()
        try:
            if predecessor is not None:
                await predecessor.gone.wait()
            await asyncio.sleep(self._backoff_s(model.record.digest))
            async with self._load_lock:
                await self._start_in_room(model)
        except BaseException as error:
            self._drop(model)
            self._leaving.discard(model)
            model.gone.set()
            if isinstance(error, CavectlError) and error.code == "worker_died":
                self._note_death(model.record.digest)
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
                return await self._start(model, max(0, free - PROCESS_BYTES))
            except CavectlError as error:
                idle = [other for other in self._by_last_use() if not other.active]
                if error.code != "out_of_memory" or not idle:
                    raise
            await self._give_way(idle[0], model)

    async def _start(self, model: LoadedModel, memory_bytes: int) -> None:
        """Load the worker's half and the text half at once; if one fails, the other does not stay."""

        def note(progress: LoadProgress) -> None:
            model.progress = progress

        text = asyncio.create_task(asyncio.to_thread(self._load_text, model.record))
        worker = asyncio.create_task(
            WorkerClient.start(
                _command(self._settings),
                self._worker_config(model, memory_bytes),
                load_timeout_s=self._settings.load_timeout_s,
                on_progress=note,
            )
        )
        try:
            done, _ = await asyncio.wait({text, worker}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except BaseException:
            worker.cancel()
            await asyncio.wait({text, worker})
            if not worker.cancelled() and worker.exception() is None:
                await asyncio.shield(worker.result().stop())
            raise
        model.fill(worker.result(), text.result())

    def _worker_config(self, model: LoadedModel, memory_bytes: int) -> WorkerConfig:
        settings, record = self._settings, model.record
        return WorkerConfig(
            model_path=str(record.weights),
            format=record.info.format,
            backend=settings.backend,  # pyright: ignore[reportArgumentType]  # checked by daemon/config.py
            context_tokens=model.context_tokens,
            kv_memory_bytes=settings.kv_memory_bytes or None,
            memory_bytes=memory_bytes,
            threads=settings.threads or None,
            parent_pid=os.getpid(),
        )

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

    async def _watch(self, model: LoadedModel) -> None:
        """A worker that ends unasked takes its slot with it, so that the next request starts another."""
        await model.worker.ended.wait()
        if model.worker.unexpected_end:
            self._note_death(model.record.digest)
            self._stop(model)

    # --- deaths ---------------------------------------------------------------------------------------------------------------

    def _note_death(self, digest: str) -> None:
        count, last = self._deaths.get(digest, (0, -math.inf))
        now = time.monotonic()
        self._deaths[digest] = (count + 1 if now - last < FORGIVE_S else 1, now)

    def _backoff_s(self, digest: str) -> float:
        """The first death costs nothing; each further one within a minute doubles the wait before the next start."""
        count, last = self._deaths.get(digest, (0, 0.0))
        if count < 2:
            return 0.0
        wait = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** (count - 2))
        return max(0.0, last + wait - time.monotonic())

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


def _command(settings: Settings) -> list[str]:
    return shlex.split(settings.worker_command) or python_module("engine.worker")


def _context_tokens(info: ModelInfo, asked: int | None, configured: int) -> int:
    """The context to load with: the default, or what is asked if more. Raises InvalidRequest for more than the model can."""
    if asked is not None and asked > info.context_tokens:
        raise InvalidRequest(
            f"a context of {asked} tokens was asked for, the model holds {info.context_tokens}",
            hint="ask for a smaller `ctx` (num_ctx)",
        )
    return max(asked or 0, min(info.context_tokens, configured or DEFAULT_CONTEXT_TOKENS))
