"""A store with short times and no child per model; light to import, for the child processes of tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from daemon.store import Retries, StoreSettings, Timeouts
from engine.inspect import inspect_model
from engine.types import ModelInfo

QUICK = StoreSettings(
    environ={},
    timeouts=Timeouts(connect_s=2, read_s=1, answer_s=4),
    retries=Retries(limit=3, base_s=0.01, cap_s=0.02, longest_wait_s=1.5),
    headroom_bytes=0,
    pack=False,
)


class LocalInspector:
    """What the child would say, without a process per model: the same function, called here."""

    async def inspect(self, path: Path) -> ModelInfo:
        return await asyncio.to_thread(inspect_model, path)
