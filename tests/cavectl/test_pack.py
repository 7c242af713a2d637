"""`cavectl pack`: packed weights by hand, without a daemon."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.store import Store, StoreSettings
from tests.cavectl.conftest import Home
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand


@pytest.fixture
def store(home: Home, tmp_path: Path) -> Store:
    """With the model `tiny`, imported in place and not packed."""
    model = tiny_rand()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(model.config, model.tensors, byte_vocabulary(320))))
    store = Store(home.data_dir, settings=replace(StoreSettings(), pack=False))
    asyncio.run(store.import_path(path, "tiny"))
    return store


def test_a_model_is_packed_once(home: Home, store: Store) -> None:
    done = home.run("pack", "tiny")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert done.stderr.startswith(b"tiny:latest: ") and b"packed in" in done.stderr
    packed = store.get("tiny").packed
    assert packed.exists()
    again = home.run("pack", "tiny")
    assert (again.returncode, again.stdout) == (0, b"") and b"packed already" in again.stderr
    assert not (home.data_dir / "logs").exists(), "no daemon was needed"


def test_json_is_one_document(home: Home, store: Store) -> None:
    done = home.run("pack", "tiny", "nobody:1", "--json")
    assert done.returncode == 3
    tiny, nobody = json.loads(done.stdout)["models"]
    record = store.get("tiny")
    assert (tiny["model"], tiny["made"], tiny["notes"]) == ("tiny:latest", True, [])
    assert tiny["packed_bytes"] == record.packed.stat().st_size
    assert tiny["source_bytes"] == record.info.weight_bytes
    assert (nobody["model"], nobody["code"]) == ("nobody:1", "model_not_found")
    assert b"error: there is no model nobody:1" in done.stderr


def test_a_model_that_cannot_be_packed_is_an_error(home: Home, store: Store) -> None:
    store.get("tiny").packed.mkdir()
    done = home.run("pack", "tiny")
    assert done.returncode == 1
    assert b"error: the packed weights cannot be written" in done.stderr and b"Traceback" not in done.stderr


def test_another_machine_is_not_packed(home: Home) -> None:
    done = home.run("--url", "http://127.0.0.1:1", "pack", "tiny")
    assert done.returncode == 2 and b"leave --url out" in done.stderr
