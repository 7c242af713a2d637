"""pull through the real daemon and a fake hub: interrupted and resumed, and the hub's refusals as exit codes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from tests.cavectl.conftest import Home
from tests.cavectl.real_daemon import real_home
from tests.fixtures.fake_hub import FakeHub, Fault
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand

REPO = "alice/poet"
NAME = f"hf.co/{REPO}"


@pytest.fixture(scope="module")
def model() -> bytes:
    tiny = tiny_rand(1, width=128, ffn=256)
    return gguf_bytes(llama_gguf(tiny.config, tiny.tensors, byte_vocabulary(tiny.config["vocab_size"])))


@pytest.fixture
def hub(model: bytes) -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.add(REPO, {"poet-Q8_0.gguf": model})
        yield server


@pytest.fixture
def real(hub: FakeHub) -> Iterator[Home]:
    with real_home(CAVECTL_HUB_ENDPOINT=hub.endpoint) as home:
        yield home


def test_ctrl_c_leaves_what_the_next_pull_goes_on_from(real: Home, hub: FakeHub, model: bytes) -> None:
    assert real.run("daemon", "start").returncode == 0
    hub.bytes_per_second = len(model) / 8
    process = real.popen("pull", NAME)
    assert process.stderr is not None
    while not re.search(rb"gguf: [1-9]\d?%", line := process.stderr.readline()):
        assert line, "the pull ended early"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"cavectl pull {NAME} goes on from there" in error.decode()
    assert b"Traceback" not in error
    assert json.loads(real.run("list", "--json").stdout)["models"] == []
    hub.bytes_per_second = 0
    done = real.run("pull", NAME, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "success"
    assert [entry.headers for entry in hub.log if "range" in map(str.lower, entry.headers)]
    (listed,) = json.loads(real.run("list", "--json").stdout)["models"]
    assert (listed["name"], listed["size"]) == (f"{NAME}:latest", len(model))


def test_an_unknown_repository(real: Home) -> None:
    done = real.run("pull", "hf.co/alice/nothing")
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"error: the hub has no such model" in done.stderr


def test_a_hub_that_fails(real: Home, hub: FakeHub) -> None:
    hub.faults.append(Fault("status", path="/api/", status=500, times=100))
    assert real.run("pull", NAME, environ={}).returncode == 7


def test_an_unknown_name_of_the_catalog(real: Home) -> None:
    done = real.run("pull", "smollm2:153m")
    assert done.returncode == 3
    assert b"smollm2:135m" in done.stderr
