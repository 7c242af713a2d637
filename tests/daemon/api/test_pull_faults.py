"""A pull whose daemon is killed, and one that meets a full disk: through HTTP, with the real store. Rows B23 and B24."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.process import Daemon, running
from tests.daemon.scripted import Scripted, ndjson, post
from tests.daemon.wire import until
from tests.fixtures.fake_hub import FakeHub
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

NAME = "hf.co/tiny/rand"
WEIGHTS = "model.safetensors"
CHUNK = 256 << 10


def checkpoint(folder: Path, **sizes: int) -> dict[str, bytes]:
    tiny_rand(seed=6, context_tokens=64, **sizes).save(folder)  # type: ignore[arg-type]
    write_tiny_tok(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """17 MB of weights."""
    return checkpoint(tmp_path_factory.mktemp("large"), layers=4, width=256, ffn=1024)


@pytest.fixture
def hub(large: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("tiny/rand", large)
        yield hub


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cavectl-"))  # short: it holds a Unix socket
    yield path
    shutil.rmtree(path)


def pull(daemon: Daemon) -> list[dict[str, object]]:
    return ndjson(Scripted(daemon, daemon.folder).post("/api/pull", {"model": NAME}).body)


@pytest.mark.parametrize("percent", [10, 40, 90])
def test_b23_a_daemon_killed_in_mid_pull(hub: FakeHub, large: dict[str, bytes], folder: Path, percent: int) -> None:
    """kill -9: the model is absent, the next daemon starts on the same folder and goes on, at most one chunk is fetched again."""
    size = len(large[WEIGHTS])
    hub.bytes_per_second = size / 2
    env = {"CAVECTL_HUB_ENDPOINT": hub.endpoint}
    with running(folder, module="daemon", env=env) as first:
        client = first.client()
        client.send(post("/api/pull", {"model": NAME}))
        until(lambda: hub.sent("/blob/") >= size * percent // 100 or None)
        first.end(signal.SIGKILL)
        with pytest.raises((EOFError, ConnectionError)):
            client.reply()
    hub.bytes_per_second = 0
    here = sum(file.stat().st_size for file in folder.glob("data/partial/*/data"))
    assert size * percent // 100 - (1 << 20) <= here < size
    hub.log.clear()
    with running(folder, module="daemon", env=env) as second:
        daemon = Scripted(second, folder)
        assert daemon.get("/api/tags").json == {"models": []}
        assert daemon.post("/api/show", {"model": NAME}).code == "model_not_found"
        assert pull(second)[-1]["status"] == "success"
        assert hub.sent("/blob/") <= size - here + CHUNK
        [model] = daemon.get("/api/tags").json["models"]
        assert model["size"] == sum(map(len, large.values()))
    (weights,) = folder.glob(f"data/models/**/{WEIGHTS}")
    assert weights.read_bytes() == large[WEIGHTS]


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of 24 MiB, of which the store keeps 16 free, as the daemon's data folder."""
    disk = folder / "data"
    disk.mkdir(mode=0o700)
    options = ["-o", "size=24m,mode=0700"]
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(disk)], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here ({mount.stderr.decode().strip()}); the fault layer covers ENOSPC")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_b24_a_full_disk_is_an_error_and_the_next_pull_works(hub: FakeHub, tmp_path: Path, folder: Path, small_disk: Path) -> None:
    """The same daemon, without a restart: nothing is listed, nothing is left, and a model that fits is pulled."""
    with running(folder, module="daemon", env={"CAVECTL_HUB_ENDPOINT": hub.endpoint}) as process:
        daemon = Scripted(process, folder)
        last = pull(process)[-1]
        assert last["code"] == "no_space" and "need " in str(last["error"]) and "have " in str(last["error"])
        assert daemon.post("/api/pull", {"model": NAME, "stream": False}).status == 507
        assert daemon.get("/api/tags").json == {"models": []}
        assert not list(small_disk.glob("partial/*"))
        hub.add("tiny/rand", checkpoint(tmp_path / "small"))
        assert pull(process)[-1]["status"] == "success"
        assert len(daemon.get("/api/tags").json["models"]) == 1
        assert process.end() == 0
