"""Models whose files went bad, and what a daemon that was killed left: over HTTP, with the real store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.process import running
from tests.daemon.scripted import Scripted, spelled
from tests.daemon.wire import until

NAME = "tiny/bad:latest"


@pytest.fixture
def weights(daemon: Scripted, tiny_model: Path) -> Iterator[Path]:
    """The copied weights of a model of its own, which is loaded."""
    daemon.post("/api/import", {"path": str(tiny_model), "name": NAME, "mode": "copy"})
    daemon.script(spelled("x"))
    assert daemon.post("/v1/completions", {"model": NAME, "prompt": "q"}).status == 200
    (found,) = (daemon.folder / "data" / "models" / "tiny" / "bad").glob("*/model.safetensors")
    yield found
    daemon.unload()
    daemon.post("/api/delete", {"model": NAME}, method="DELETE")


def loaded(daemon: Scripted) -> list[str]:
    return [model["name"] for model in daemon.get("/api/ps").json["models"]]


def listed(daemon: Scripted) -> list[str]:
    return [model["name"] for model in daemon.get("/api/tags").json["models"]]


def delete(daemon: Scripted) -> None:
    assert daemon.post("/api/delete", {"model": NAME.upper()}, method="DELETE").json == {"status": "success"}
    assert NAME not in listed(daemon)
    until(lambda: NAME not in loaded(daemon) or None)


@pytest.mark.parametrize("damage", ["short", "gone", "manifest"])
def test_a_damaged_model_is_removed_and_its_loaded_copy_forgotten(daemon: Scripted, weights: Path, damage: str) -> None:
    if damage == "short":
        weights.write_bytes(b"x")
    elif damage == "gone":
        weights.unlink()
    else:
        (weights.parent / "manifest.json").write_bytes(b"{")
    assert daemon.post("/v1/completions", {"model": NAME, "prompt": "q"}).status >= 400
    assert loaded(daemon) == [NAME]
    delete(daemon)
    assert not weights.parent.exists()


def test_what_a_killed_daemon_left_is_cleared_at_the_start() -> None:
    folder = Path(tempfile.mkdtemp(prefix="cavectl-"))
    try:
        half_removed = folder / "data" / "removed" / "token"
        for path in (folder / "data", half_removed.parent, half_removed):
            path.mkdir(mode=0o700)
        with running(folder, module="daemon"):
            until(lambda: not half_removed.exists() or None)
    finally:
        shutil.rmtree(folder)
