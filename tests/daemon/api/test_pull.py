"""/api/pull over HTTP: progress, and clients that leave. The download itself is tested with the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.scripted import Scripted, ndjson, post, scripted_daemon, spelled
from tests.daemon.wire import until
from tests.fixtures.fake_hub import FakeHub, Fault
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

NAME = "hf.co/tiny/rand"


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights than the imported model's, or they would be taken from there."""
    folder = tiny_rand(seed=5, context_tokens=64, layers=4, width=256, ffn=1024).save(tmp_path_factory.mktemp("remote"))
    write_tiny_tok(folder)
    return folder


@pytest.fixture
def hub(remote: Path) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("tiny/rand", {file.name: file.read_bytes() for file in remote.iterdir()}, lfs=frozenset())
        yield hub


@pytest.fixture
def daemon(hub: FakeHub, tiny_model: Path) -> Iterator[Scripted]:
    with scripted_daemon(tiny_model, hub_endpoint=hub.endpoint) as daemon:
        yield daemon


def size(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def test_pull_then_chat(daemon: Scripted) -> None:
    lines = ndjson(daemon.post("/api/pull", {"model": NAME}).body)
    assert lines[-1] == {"status": "success", "model": f"{NAME}:latest"}
    counts = [line["completed"] for line in lines if line.get("file") == "model.safetensors"]
    assert counts == sorted(counts) and all(line["completed"] <= line["total"] for line in lines if "total" in line)
    assert any(model["name"].startswith(NAME) for model in daemon.get("/api/tags").json["models"])
    daemon.script(spelled("o", "k"))
    body = {"model": NAME, "messages": [{"role": "user", "content": "q"}]}
    assert daemon.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "ok"
    assert daemon.post("/api/pull", {"model": NAME, "stream": False}).json == lines[-1]


def test_errors_before_and_after_the_first_line(daemon: Scripted, hub: FakeHub) -> None:
    missing = daemon.post("/api/pull", {"model": "hf.co/tiny/nothing", "stream": False})
    assert (missing.status, missing.code) == (404, "hub_not_found")
    last = ndjson(daemon.post("/api/pull", {"model": "hf.co/tiny/nothing"}).body)[-1]
    assert last["code"] == "hub_not_found" and last["error"]
    assert daemon.post("/api/pull", {"model": "tiny/rand"}).json["code"] == "model_not_found"


def test_one_client_leaves_and_the_other_gets_its_model(daemon: Scripted, hub: FakeHub, remote: Path) -> None:
    hub.bytes_per_second = size(remote) / 2
    leaves, stays = daemon.client(), daemon.client()
    for client in (leaves, stays):
        client.send(post("/api/pull", {"model": NAME}))
    until(lambda: hub.sent("model.safetensors") > 1000 or None)
    leaves.close()
    lines = ndjson(stays.reply().body)
    stays.close()
    assert lines[-1] == {"status": "success", "model": f"{NAME}:latest"}
    assert hub.sent("model.safetensors") == size(remote), "fetched once for both"


def test_the_last_client_leaves_and_the_next_pull_goes_on_where_it_was(daemon: Scripted, hub: FakeHub, remote: Path) -> None:
    hub.faults.append(Fault("stall", path="model.safetensors", at=size(remote) // 2))
    client = daemon.client()
    client.send(post("/api/pull", {"model": NAME}))
    partial = daemon.folder / "data" / "partial"
    until(lambda: sum(file.stat().st_size for file in partial.rglob("data")) >= size(remote) // 2 - (2 << 20) or None)
    client.close()
    lines = ndjson(daemon.post("/api/pull", {"model": NAME}).body)
    assert lines[-1] == {"status": "success", "model": f"{NAME}:latest"}
    assert hub.sent("model.safetensors") <= size(remote) + (3 << 20)


def test_the_times_of_the_settings_reach_the_download(hub: FakeHub, tiny_model: Path, remote: Path) -> None:
    """A hub that stops sending is given up after read_timeout_s (30 s if nobody says), and the pull goes on where it was."""
    hub.faults.append(Fault("stall", path="model.safetensors", at=size(remote) // 2))
    with scripted_daemon(tiny_model, hub_endpoint=hub.endpoint, read_timeout_s="0.3") as daemon:
        began = time.monotonic()
        assert ndjson(daemon.post("/api/pull", {"model": NAME}).body)[-1]["status"] == "success"
        assert time.monotonic() - began < 15
