"""One load of a model: what the worker is told, and both halves of the model side by side.

Not here: whether there is room for it and what happens when it ends (daemon/models.py). Invariant: either both halves are there at
the end, or neither is left.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import Protocol

from daemon.config import Settings
from daemon.interpreter import python_module
from daemon.loaded_model import LoadedModel, TextSide
from daemon.store import ModelRecord
from daemon.worker_client import WorkerClient
from engine.errors import InvalidRequest
from engine.types import LoadProgress, ModelInfo, WorkerConfig

DEFAULT_CONTEXT_TOKENS = 8192


class TextLoader(Protocol):
    """Reads a model's tokenizer and chat template; runs on a thread."""

    def __call__(self, record: ModelRecord) -> TextSide: ...


def context_tokens(info: ModelInfo, asked: int | None, configured: int) -> int:
    """The context to load with: the default, or what is asked if more. Raises InvalidRequest for more than the model can."""
    if asked is not None and asked > info.context_tokens:
        raise InvalidRequest(
            f"a context of {asked} tokens was asked for, the model holds {info.context_tokens}",
            hint="ask for a smaller `ctx` (num_ctx)",
        )
    return max(asked or 0, min(info.context_tokens, configured or DEFAULT_CONTEXT_TOKENS))


async def start(model: LoadedModel, settings: Settings, load_text: TextLoader, memory_bytes: int) -> None:
    """Load the worker's half and the text half at once; if one fails, the other does not stay."""

    def note(progress: LoadProgress) -> None:
        model.progress = progress

    text = asyncio.create_task(asyncio.to_thread(load_text, model.record))
    worker = asyncio.create_task(
        WorkerClient.start(
            shlex.split(settings.worker_command) or python_module("engine.worker"),
            _worker_config(model, settings, memory_bytes),
            load_timeout_s=settings.load_timeout_s,
            watchdog_s=settings.watchdog_s,
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


def _worker_config(model: LoadedModel, settings: Settings, memory_bytes: int) -> WorkerConfig:
    record = model.record
    return WorkerConfig(
        model_path=str(record.weights),
        format=record.info.format,
        backend=settings.backend,  # pyright: ignore[reportArgumentType]  # checked by daemon/config.py
        kv_dtype=settings.kv_dtype,  # pyright: ignore[reportArgumentType]  # likewise
        context_tokens=model.context_tokens,
        kv_memory_bytes=settings.kv_memory_bytes or None,
        memory_bytes=memory_bytes,
        threads=settings.threads or None,
        target_step_ms=settings.target_itl_ms,
        aging_s=settings.priority_aging_s,
        prefix_cache=settings.prefix_cache,
        speculation=settings.speculation,
        chat_retention_s=settings.chat_retention_s,
        rest_retention_s=settings.rest_retention_s,
        model_digest=record.digest,
        packed_path=str(record.packed),
        weights_digest=record.weights_digest,
        parent_pid=os.getpid(),
    )
