"""What the tests of hub pulls share: the model they pull, and the two ways a pull ends."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.store import PullEvent, Store
from engine.errors import CavectlError
from tests.fixtures.fake_hub import git_blob_id

MakeStore = Callable[..., Store]
NAME = "hf.co/Tiny/Llama-GGUF"
FILE = "llama-Q4_K_M.gguf"


def pull(store: Store, name: str = NAME) -> list[PullEvent]:
    events: list[PullEvent] = []
    asyncio.run(store.pull(name, events.append))
    return events


def refused(store: Store, name: str = NAME) -> CavectlError:
    with pytest.raises(CavectlError) as caught:
        pull(store, name)
    assert store.list() == []
    return caught.value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cache_repo(cache: Path, repo: str, files: dict[str, bytes], lfs: set[str], commit: str) -> Path:
    """A cached repository as huggingface_hub lays it out; gives the snapshot folder."""
    base = cache / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    base.joinpath("blobs").mkdir()
    for name, data in files.items():
        value = sha256(data) if name in lfs else git_blob_id(data)
        base.joinpath("blobs", value).write_bytes(data)
        snapshot.joinpath(name).symlink_to(f"../../blobs/{value}")
    return snapshot
