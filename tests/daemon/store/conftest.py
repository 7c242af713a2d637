"""A store below tmp_path, a fake hub, and small real models: a GGUF and a safetensors folder as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.store import Store
from daemon.store.catalog import Catalog
from tests.daemon.store.pulling import FILE
from tests.daemon.store.quick import QUICK, LocalInspector
from tests.fixtures.fake_hub import FakeHub
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand


@pytest.fixture(scope="session")
def gguf() -> bytes:
    """A Llama GGUF of about 1.5 MB."""
    return _gguf(1)


@pytest.fixture(scope="session")
def other_gguf() -> bytes:
    """One of the same size with other bytes."""
    return _gguf(4)


def _gguf(seed: int) -> bytes:
    model = tiny_rand(seed, width=128, ffn=256)
    return gguf_bytes(llama_gguf(model.config, model.tensors, byte_vocabulary(model.config["vocab_size"])))


@pytest.fixture(scope="session")
def folder_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A Hugging Face folder with one safetensors file."""
    return _read(tiny_rand(2).save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def sharded_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same kind of folder in three shards with their index."""
    return _read(tiny_rand(3).save(tmp_path_factory.mktemp("model"), shards=3))


def _read(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"tokenizer.json": b'{"version": "1.0"}', "tokenizer_config.json": b"{}"}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        yield server


@pytest.fixture
def served(hub: FakeHub, gguf: bytes, other_gguf: bytes) -> FakeHub:
    hub.add("Tiny/Llama-GGUF", {FILE: gguf, "llama-Q8_0.gguf": other_gguf, "README.md": b"# Tiny"})
    return hub


@pytest.fixture(autouse=True)
def hf_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of huggingface_hub, an empty one; its cache is `hub` and its token `token` in there."""
    home = tmp_path / "hf"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    return home


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Store]:
    """`make_store(hub, root=..., ...)`: each call is a new Store, as after a daemon restart."""

    def make(hub: FakeHub | None = None, root: Path | None = None, **options: Any) -> Store:
        options.setdefault("settings", QUICK)
        options.setdefault("inspector", LocalInspector())
        options.setdefault("catalog", Catalog(()))
        return Store(root or tmp_path / "store", endpoint=hub.endpoint if hub else "http://127.0.0.1:9", **options)

    return make


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        folder.joinpath(name).write_bytes(data)
    return folder


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every entry below `folder`: file bytes, link targets, "dir"."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = f"-> {path.readlink()}" if path.is_symlink() else path.read_bytes() if path.is_file() else "dir"
    return found


def leftovers(root: Path) -> list[str]:
    """Entries of the private folders of a store."""
    return [
        f"{top}/{path.name}" for top in ("partial", "staging", "removed", "kept") for path in sorted(root.joinpath(top).glob("*"))
    ]
