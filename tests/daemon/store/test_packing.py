"""Packed weights in the store: made on the way in, beside the model, gone with it, and never a reason for a model not to come."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.store import PullEvent, Store
from daemon.store.packer import ChildPacker
from daemon.store.paths import PACKED
from engine.errors import CavectlError
from engine.types import PackReport
from engine.weights.packed import PackedFile
from tests.daemon.store.conftest import leftovers, tree, write_files
from tests.daemon.store.pulling import FILE, NAME, pull
from tests.daemon.store.quick import QUICK
from tests.fixtures.fake_hub import FakeHub

MakeStore = Callable[..., Store]
PACK = replace(QUICK, pack=True)


class Noting:
    """A packer that writes down what it is asked, and makes a file or fails."""

    def __init__(self, error: CavectlError | None = None) -> None:
        self.asked: list[tuple[Path, Path, str]] = []
        self._error = error

    async def pack(self, weights: Path, target: Path, digest: str) -> PackReport:
        self.asked.append((weights, target, digest))
        if self._error is not None:
            raise self._error
        target.write_bytes(b"packed")
        return PackReport(made=True, source_bytes=1, packed_bytes=6, pack_ms=0.1)


def take(store: Store, path: Path, name: str, mode: str = "auto") -> list[PullEvent]:
    events: list[PullEvent] = []
    asyncio.run(store.import_path(path, name, mode, events.append))  # type: ignore[arg-type]
    return events


# --- the real child -----------------------------------------------------------------------------------------------------------


def test_a_pull_leaves_packed_weights_that_a_worker_may_use(served: FakeHub, make_store: MakeStore) -> None:
    store = make_store(served, settings=PACK)
    events = [event.status for event in pull(store)]
    assert events.index("packing weights") < events.index("writing manifest")
    record = store.get(NAME)
    assert record.packed == record.root / PACKED
    assert record.weights_digest == f"sha256:{record.files[0].sha256}"
    packed = PackedFile.open(record.packed, record.weights_digest)
    assert packed.meta.source == FILE
    packed.close()
    assert record.packed.stat().st_mode & 0o777 == 0o600


def test_it_is_no_file_of_the_model(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    """Not in the manifest, not in the size, nothing to verification, and gone with the model."""
    store = make_store(served, settings=PACK)
    pull(store)
    assert [(file.name, file.size) for file in store.list()[0].files] == [(FILE, len(gguf))]
    asyncio.run(store.verify(NAME))
    store.get(NAME).packed.write_bytes(b"damaged")
    asyncio.run(store.verify(NAME))
    store.get(NAME).root.joinpath(f".{PACKED}.0123456789abcdef").write_bytes(b"left by a killed process")
    store.remove(NAME)
    assert store.list() == [] and leftovers(store.root) == [] and not list(store.root.glob("models/*"))


def test_a_repair_and_another_revision_bring_their_own(hub: FakeHub, make_store: MakeStore, gguf: bytes, other_gguf: bytes) -> None:
    hub.add("Tiny/Llama-GGUF", {FILE: gguf})
    store = make_store(hub, settings=PACK)
    pull(store)
    hub.add("Tiny/Llama-GGUF", {FILE: other_gguf})
    pull(store)
    record = store.get(NAME)
    PackedFile.open(record.packed, record.weights_digest).close()
    record.weights.write_bytes(gguf)
    with pytest.raises(CavectlError):
        asyncio.run(store.verify(NAME))
    pull(store)
    record = store.get(NAME)
    PackedFile.open(record.packed, record.weights_digest).close()
    assert leftovers(store.root) == []


@pytest.mark.parametrize(("mode", "beside"), [("in-place", False), ("link", True), ("copy", True)])
def test_an_import_has_them_in_the_store(
    make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes], mode: str, beside: bool
) -> None:
    folder = write_files(tmp_path / "llama", sharded_files)
    store = make_store(settings=PACK)
    events = take(store, folder, "mine", mode)
    assert "packing weights" in [event.status for event in events]
    record = store.get("mine")
    packed = PackedFile.open(record.packed, record.weights_digest)
    assert packed.tensors
    packed.close()
    assert (record.packed.parent == record.weights) == beside
    store.remove("mine")
    assert tree(folder) == sharded_files  # nothing was put there
    assert leftovers(store.root) == []


def test_by_hand(make_store: MakeStore, served: FakeHub) -> None:
    store = make_store(served)
    pull(store)
    assert not store.get(NAME).packed.exists()
    record, report = asyncio.run(store.pack(NAME))
    assert report.made and report.packed_bytes == record.packed.stat().st_size
    assert not asyncio.run(store.pack(NAME))[1].made
    record.packed.write_bytes(b"damaged")
    assert asyncio.run(store.pack(NAME))[1].made


def test_what_cannot_be_packed_by_hand_says_why(make_store: MakeStore, served: FakeHub, tmp_path: Path) -> None:
    store = make_store(served)
    pull(store)
    store.get(NAME).packed.mkdir()
    with pytest.raises(CavectlError, match="cannot be written") as caught:
        asyncio.run(store.pack(NAME))
    assert caught.value.code == "store_error" and str(tmp_path) not in caught.value.message


# --- what is asked of a packer, and what becomes of its failures --------------------------------------------------------------


def test_a_store_that_does_not_pack_asks_nobody(make_store: MakeStore, served: FakeHub) -> None:
    packer = Noting()
    events = [event.status for event in pull(make_store(served, packer=packer))]
    assert packer.asked == [] and "packing weights" not in events


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("no_space", "WARNING"),
        ("store_error", "WARNING"),
        ("no_process", "WARNING"),
        ("unsupported_model", "INFO"),
        ("device_unavailable", "INFO"),
    ],
)
def test_a_failure_is_a_line_in_the_log(
    make_store: MakeStore, served: FakeHub, caplog: pytest.LogCaptureFixture, code: str, level: str
) -> None:
    packer = Noting(CavectlError("it went wrong", code=code))  # type: ignore[arg-type]
    store = make_store(served, settings=PACK, packer=packer)
    with caplog.at_level(logging.INFO, "cavectl.store"):
        assert pull(store)[-1].status == "success"
    assert len(packer.asked) == 1 and not store.get(NAME).packed.exists()
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if "packed" in r.getMessage()]
    assert lines == [(level, f"{NAME}:latest is kept without packed weights: it went wrong")]


def test_the_weights_of_all_shards_make_the_digest(make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes]) -> None:
    digests = []
    for name, changed in (("a", ""), ("b", "tokenizer.json"), ("c", "model-00002-of-00003.safetensors")):
        files = {n: data if n != changed else data.replace(b"1.0", b"1.1") + b"" for n, data in sharded_files.items()}
        if name == "c":
            data = bytearray(files[changed])
            data[-1] ^= 1
            files[changed] = bytes(data)
        packer = Noting()
        store = make_store(settings=PACK, packer=packer, root=tmp_path / f"store-{name}")
        take(store, write_files(tmp_path / name, files), name, "copy")
        assert packer.asked[0][2] == store.get(name).weights_digest
        digests.append(packer.asked[0][2])
    assert digests[0] == digests[1] != digests[2]


def child(tmp_path: Path, script: str, **options: float) -> ChildPacker:
    program = tmp_path / "child.py"
    program.write_text(script)
    return ChildPacker(command=(sys.executable, str(program)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("raise SystemExit(7)", "exit code 7"),
        ("print('nonsense')", "cannot be read"),
        ("print('nonsense'); raise SystemExit(1)", "cannot be read"),
        ("print('x' * (2 << 20))", "printed too much"),
        ("import time; time.sleep(60)", "took too long"),
    ],
)
def test_a_child_that_goes_wrong_is_one_error(tmp_path: Path, script: str, says: str) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"x")
    started = time.monotonic()
    with pytest.raises(CavectlError, match=says):
        asyncio.run(child(tmp_path, script, timeout_s=2.0).pack(weights, tmp_path / PACKED, "sha256:0"))
    assert time.monotonic() - started < 20


def test_the_limits_of_the_child_grow_with_the_model(tmp_path: Path) -> None:
    script = "import sys; print(sys.argv[1:], file=open(sys.argv[3], 'w')); raise SystemExit(3)"
    folder = tmp_path / "model"
    folder.mkdir()
    folder.joinpath("a").write_bytes(bytes(1000))
    folder.joinpath("b").write_bytes(bytes(24))
    with pytest.raises(CavectlError):
        packer = child(tmp_path, script, memory_limit_bytes=1 << 20, keep_free_bytes=77)
        asyncio.run(packer.pack(folder, tmp_path / "out", "sha256:0"))
    said = eval((tmp_path / "out").read_text())
    assert said == [
        *(str(folder), "--target", str(tmp_path / "out"), "--digest", "sha256:0"),
        *("--memory-limit-bytes", str((1 << 20) + 4 * 1024), "--keep-free-bytes", "77"),
    ]


def test_a_cancelled_pull_takes_the_child_and_its_file_with_it(make_store: MakeStore, served: FakeHub, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "open(sys.argv[3], 'w').write('half')\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    store = make_store(served, settings=PACK, packer=child(tmp_path, script))

    async def cancel() -> None:
        task = asyncio.create_task(store.pull(NAME, lambda _: None))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert store.list() == []
    assert not [entry for entry in leftovers(store.root) if entry.startswith(("staging", "kept", "removed"))]


def test_a_file_of_that_name_is_not_taken_from_anybody(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    hub.add("Tiny/Llama", folder_files | {PACKED: b"theirs"})
    store = make_store(hub)
    pull(store, "hf.co/Tiny/Llama")
    assert not store.get("hf.co/Tiny/Llama").packed.exists()
