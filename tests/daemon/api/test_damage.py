"""Models whose files went bad, and what a daemon that was killed left: over HTTP, with the real store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.process import running
from tests.daemon.scripted import Scripted, ndjson, spelled
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


def verify(daemon: Scripted) -> list[Any]:
    return ndjson(daemon.post("/api/verify", {"model": NAME.upper()}).body)


def test_verify_names_the_bad_file_and_frees_the_memory(daemon: Scripted, weights: Path) -> None:
    lines = verify(daemon)
    assert lines[-1] == {"status": "success", "model": NAME} and loaded(daemon) == [NAME]
    reports = [line for line in lines if line.get("file") == weights.name]
    assert reports and all(line["status"] == f"verifying {weights.name}" for line in reports)
    assert reports[-1]["completed"] == reports[-1]["total"] == weights.stat().st_size

    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    last = verify(daemon)[-1]
    assert last["code"] == "hash_mismatch" and weights.name in last["error"] and last["hint"]
    until(lambda: loaded(daemon) == [] or None)
    reply = daemon.post("/api/verify", {"model": NAME, "stream": False})
    assert reply.code == "hash_mismatch" and weights.name in reply.json["error"]
    assert daemon.post("/v1/completions", {"model": NAME, "prompt": "q"}).code == "hash_mismatch"

    weights.write_bytes(good)
    assert daemon.post("/api/verify", {"model": NAME, "stream": False}).json == {"status": "success", "model": NAME}
    daemon.script(spelled("x"))
    assert daemon.post("/v1/completions", {"model": NAME, "prompt": "q"}).status == 200


def test_verify_of_what_is_not_here(daemon: Scripted) -> None:
    reply = daemon.post("/api/verify", {"model": "tiny/nothing"})
    assert (reply.status, reply.code) == (404, "model_not_found")
    assert daemon.post("/api/verify", {}).code == "invalid_request"


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
