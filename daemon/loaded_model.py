"""One loaded model: its record, its worker, its text side, and who uses it. The rules are in daemon/models.py."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Literal

from daemon.memory import Holder, Kept, resident_bytes
from daemon.store import ModelRecord
from daemon.text.chat_template import ChatTemplate
from daemon.text.tokenizer import Tokenizer
from daemon.worker_client import WorkerClient
from engine.errors import CavectlError
from engine.types import LoadProgress

State = Literal["loading", "ready", "stopping"]


@dataclass(frozen=True, slots=True)
class TextSide:
    """What the daemon needs of a model to speak with it; the worker has the rest."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


class LoadedModel:
    """One model in the table, from the first request for it until its worker is gone.

    `active` counts those who use or await it. `retired`: new requests go elsewhere, and it stops with its last user.
    """

    def __init__(self, record: ModelRecord, context_tokens: int, keep_alive_s: float, *, kept: Kept, restart: bool = False) -> None:
        self.record = record
        self.kept = kept
        self.restart = restart  # it takes the place of one whose worker died
        self.context_tokens = context_tokens
        self.keep_alive_s = keep_alive_s
        self.needed_bytes = resident_bytes(record.info, context_tokens, kept)
        self.state: State = "loading"
        self.progress = LoadProgress("waiting", 0.0)
        self.active = 0
        self.retired = False
        self.last_used = time.monotonic()
        self.load_ms = 0.0
        self.gone = asyncio.Event()
        self.loading: asyncio.Task[None] | None = None
        self.expiry: asyncio.Handle | None = None  # for 0 s uvloop gives a handle that knows no time
        self.expires_at = math.inf  # monotonic seconds, while there is an expiry
        self._growing = asyncio.Lock()
        self._worker: WorkerClient | None = None
        self._text: TextSide | None = None

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def usable(self) -> bool:
        return not self.retired and self.state != "stopping" and (self._worker is None or self._worker.alive)

    @property
    def worker(self) -> WorkerClient:
        assert self._worker is not None, "asked before the load ended"
        return self._worker

    @property
    def text(self) -> TextSide:
        assert self._text is not None, "asked before the load ended"
        return self._text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        return self.text.template

    @property
    def started(self) -> WorkerClient | None:
        return self._worker

    def fill(self, worker: WorkerClient, text: TextSide) -> None:
        self._worker, self._text = worker, text
        self.state = "ready"

    @property
    def died(self) -> bool:
        """Its worker ended unasked."""
        return self._worker is not None and self._worker.unexpected_end

    @property
    def healthy(self) -> bool:
        """False while what was loaded cannot be used: the worker hangs or died, or its successor is not ready."""
        return not self.restart if self._worker is None else not self._worker.suspect

    async def grow(self, context_tokens: int) -> bool:
        """Let sequences have so many tokens, while others run on. False: only loading again can do it.

        Raises the worker's reason, with both numbers, when it cannot be done.
        """
        async with self._growing:
            if context_tokens <= self.context_tokens:
                return True
            grown = await self.worker.grow(context_tokens)
            if grown.error is not None and not grown.reload:
                raise CavectlError.from_info(grown.error)
            if not grown.reload:
                self.context_tokens = context_tokens
                self.needed_bytes = resident_bytes(self.record.info, context_tokens, self.kept)
            return not grown.reload

    @property
    def held_bytes(self) -> int:
        """What the worker says its weights and cache take; 0 until it is loaded."""
        info = self._worker.info if self._worker is not None else None
        return info.weight_bytes + info.kv_bytes if info is not None else 0

    @property
    def holder(self) -> Holder:
        return Holder(self.worker.pid, self.held_bytes)

    @property
    def expires_in_s(self) -> float:
        """Seconds until it is unloaded, infinite while it is used or kept for ever."""
        if self.expiry is None:
            return math.inf if self.keep_alive_s == math.inf or self.active else self.keep_alive_s
        return max(0.0, self.expires_at - time.monotonic())
