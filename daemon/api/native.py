"""Routes about models: version, tags, show, ps, pull, import, verify, delete; and the liveness line at /.

Shapes are Ollama's, because clients probe these routes; what is ours beside them is said in the README. Invariant: nothing here
generates, and a pull, import or verification goes on only while somebody waits for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from daemon.answer import Exchange
from daemon.api.errors import BadField
from daemon.api.fields import IMPORT, OLLAMA_DELETE, OLLAMA_PULL, OLLAMA_SHOW, VERIFY
from daemon.api.intake import read_fields
from daemon.api.ollama import timestamp
from daemon.api.openai import State
from daemon.api.readers import Fields
from daemon.loaded_model import LoadedModel
from daemon.store import ModelRecord, PullEvent
from daemon.text.chat_template import ChatTemplate, template_for
from engine.errors import CavectlError
from engine.types import EngineStats

COMPATIBLE_VERSION = "0.12.0"  # of the API that clients test for
FOR_EVER = "9999-12-31T23:59:59Z"
DONE = "success"

Progress = Callable[[PullEvent], None]


class Native:
    def __init__(self, state: State, version: str) -> None:
        self._state = state
        self._version = version

    async def root(self, exchange: Exchange) -> None:
        await exchange.text("cavectl is running")

    async def version(self, exchange: Exchange) -> None:
        await exchange.json({"version": COMPATIBLE_VERSION, "cavectl": self._version})

    async def metrics(self, exchange: Exchange) -> None:
        stats = [m.started.stats for m in self._state.models.loaded if m.started is not None and m.started.stats is not None]
        admission = self._state.admission
        gone = self._state.models.totals
        text = self._state.metrics.text(stats, gone, active=admission.active, waiting=admission.waiting)
        await exchange.text(text, "text/plain; version=0.0.4; charset=utf-8")

    async def tags(self, exchange: Exchange) -> None:
        records = await asyncio.to_thread(self._state.store.list)
        await exchange.json({"models": [_tag(record) for record in records]})

    async def show(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, OLLAMA_SHOW)
        await exchange.json(await asyncio.to_thread(self._show, _name(fields)))

    def _show(self, name: str) -> dict[str, Any]:
        record = self._state.store.get(name)
        return _shown(record, template_for(record.weights, record.info))

    async def ps(self, exchange: Exchange) -> None:
        await exchange.json({"models": [_loaded(model) for model in self._state.models.loaded]})

    async def delete(self, exchange: Exchange) -> None:
        name = _name(read_fields(exchange, OLLAMA_DELETE))
        self._state.models.forget(await asyncio.to_thread(self._state.store.remove, name))
        await exchange.json({"status": "success"})

    async def pull(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, OLLAMA_PULL)
        name = _name(fields)
        await _follow(exchange, fields, lambda progress: self._state.store.pull(name, progress))

    async def import_(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, IMPORT)
        path, name, mode = fields.get("path"), fields.get("name"), fields.get("mode", default="auto")
        await _follow(exchange, fields, lambda progress: self._state.store.import_path(path, name, mode, progress))

    async def verify(self, exchange: Exchange) -> None:
        fields = read_fields(exchange, VERIFY)
        name = await asyncio.to_thread(self._state.store.full_name, _name(fields))
        await _follow(exchange, fields, lambda progress: self._verify(name, progress))

    async def _verify(self, name: str, progress: Progress) -> ModelRecord:
        try:
            return await self._state.store.verify(name, progress)
        except CavectlError as error:
            if error.code == "hash_mismatch":  # nobody can ask for it now, so nothing is gained by its staying in memory
                self._state.models.forget(name)
            raise


def _name(fields: Fields) -> str:
    name = fields.get("model", "name")
    if not name:
        raise BadField("model", "`model` is missing")
    return name


async def _follow(exchange: Exchange, fields: Fields, work: Callable[[Progress], Awaitable[ModelRecord]]) -> None:
    """Answer with the progress of `work` as it comes, or only with its end."""
    if not fields.get("stream", default=True):
        await exchange.json(_done(await work(lambda _: None)))
        return
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[PullEvent | None] = asyncio.Queue()

    async def run() -> ModelRecord:
        try:
            return await work(lambda event: loop.call_soon_threadsafe(queue.put_nowait, event) and None)
        finally:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    task = asyncio.create_task(run())
    try:
        while (event := await queue.get()) is not None:
            newest = queue.empty() or event.completed in (0, event.total)  # a slow reader gets the newest count only
            if newest and event.status != DONE:
                await exchange.event(_progress(event))
        await exchange.event(_done(await task))
        await exchange.end()
    finally:
        task.cancel()
        await asyncio.wait({task})


def _done(record: ModelRecord) -> dict[str, Any]:
    """The last line: that it worked, and the full name of the model."""
    return {"status": DONE, "model": record.name}


def _progress(event: PullEvent) -> dict[str, Any]:
    line: dict[str, Any] = {"status": event.status}
    if event.total:
        line |= {"digest": event.digest, "total": event.total, "completed": event.completed}
    return line | ({"file": event.file} if event.file else {})


# --- shapes -----------------------------------------------------------------------------------------------------------------------


def _details(record: ModelRecord) -> dict[str, Any]:
    info = record.info
    return {
        "parent_model": "",
        "format": info.format,
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _human(info.parameters),
        "quantization_level": info.quantization,
        "context_length": info.context_tokens,
        "embedding_length": info.embedding_length,
    }


def _human(count: int) -> str:
    """135M, 1.1B: as model names count."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            value = count / size
            return f"{value:.1f}{letter}" if value < 10 and size == 10**9 else f"{value:.0f}{letter}"
    return str(count)


def _tag(record: ModelRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "model": record.name,
        "modified_at": timestamp(record.modified_at),
        "size": sum(file.size for file in record.files),
        "digest": record.digest.removeprefix("sha256:"),
        "details": _details(record),
        "capabilities": ["completion"],
        "source": record.source,
    }


def _shown(record: ModelRecord, template: ChatTemplate | None) -> dict[str, Any]:
    info, arch = record.info, record.info.architecture
    facts = {
        "general.architecture": arch,
        "general.basename": info.name or record.name,
        "general.parameter_count": info.parameters,
        f"{arch}.context_length": info.context_tokens,
        f"{arch}.embedding_length": info.embedding_length,
        f"{arch}.block_count": info.layers,
        f"{arch}.vocab_size": info.vocab_size,
    }
    return {
        "license": record.licence,
        "modelfile": f"FROM {record.name}\n",
        "parameters": "",
        "template": "{{ .Prompt }}",  # its real template is Jinja: `chat_template`
        "chat_template": template.source if template is not None else "",
        "details": _details(record),
        "model_info": {**info.metadata, **facts},
        "capabilities": ["completion"],
        "modified_at": timestamp(record.modified_at),
        "digest": record.digest,
        "source": record.source,
        "revision": record.revision,
        "files": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in record.files],
        "warnings": info.warnings,
    }


def _loaded(model: LoadedModel) -> dict[str, Any]:
    worker = model.started
    info = worker.info if worker is not None else None
    remaining = model.expires_in_s
    size = model.held_bytes or model.needed_bytes
    return {
        "name": model.name,
        "model": model.name,
        "size": size,
        "size_vram": size if info is not None and info.device.startswith("cuda") else 0,
        "digest": model.record.digest.removeprefix("sha256:"),
        "details": _details(model.record),
        "context_length": model.context_tokens,
        "expires_at": FOR_EVER if remaining == math.inf else timestamp(time.time() + remaining),
        "state": model.state,
        "progress": model.progress.fraction if model.state == "loading" else 1.0,
        "requests": model.active,
        "pid": worker.pid if worker is not None else None,
        "backend": info.backend if info is not None else "",
        "device": info.device if info is not None else "",
        "drafter": info.drafter if info is not None else "",
        "degraded": info.degraded if info is not None else [],
        "load_ms": model.load_ms,
        **(_engine(worker.stats) if worker is not None and worker.stats is not None else {}),
    }


def _engine(stats: EngineStats) -> dict[str, Any]:
    """What the model's engine is at, as of its last step."""
    return {
        "pages": {
            "total": stats.pages_total,
            "used": stats.pages_used,
            "cached": stats.pages_cached,
            "pinned": stats.pages_pinned,
        },
        "queue": {"running": stats.running, "waiting": stats.waiting},
        "chunk_tokens": stats.chunk_tokens,
        "preemptions": stats.preemptions,
        "hit_tokens": stats.hit_tokens,
        "evicted_pages": stats.evicted_pages,
        "accounting_errors": stats.accounting_errors,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }
