"""A model manager with real scripted workers and an invented store, for tests of loading, growing and restarting.

`run` gives a test its Bench and asserts at the end that no worker is left.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from daemon.loaded_model import LoadedModel, TextSide
from daemon.memory import Holder
from daemon.models import ModelManager
from daemon.store import ModelRecord
from engine.errors import CavectlError, ModelNotFound
from engine.types import ModelInfo
from tests.daemon.process import ROOT
from tests.daemon.scripted import WORKER, workers
from tests.daemon.wire import settings_in


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
