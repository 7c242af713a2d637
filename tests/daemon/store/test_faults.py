"""Every file operation of a pull failing or being the last (F5), kill -9 at random times, a full disk. Rows B24, S05 and the kill
row.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.store import Store
from engine.errors import CavectlError
from tests.daemon.store.conftest import leftovers, write_files
from tests.fixtures.fake_hub import FakeHub
from tests.fixtures.fault_fs import EXIT_CODE, FaultLayer

MakeStore = Callable[..., Store]
NAME = "hf.co/Tiny/Llama"


@pytest.fixture
def served(hub: FakeHub, folder_files: dict[str, bytes]) -> FakeHub:
    hub.add("Tiny/Llama", folder_files)
    return hub


def pull(store: Store) -> None:
    asyncio.run(store.pull(NAME, lambda _: None))


def check_absent_or_complete(store: Store, files: dict[str, bytes]) -> bool:
    """Whether the model is listed; if it is, every byte is right."""
    listed = store.list()
    if not listed:
        with pytest.raises(CavectlError):
            store.get(NAME)
        return False
    record = store.get(NAME)
    for name, data in files.items():
        assert record.root.joinpath(name).read_bytes() == data
    return True


def operations(served: FakeHub, make_store: MakeStore, tmp_path: Path) -> list[str]:
    layer = FaultLayer()
    pull(make_store(served, root=tmp_path / "counted", layer=layer))
    return layer.log


@pytest.mark.parametrize(
    "step", [pytest.param(6, id="sixth"), pytest.param(1, id="each", marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize(("code", "first"), [(errno.ENOSPC, 0), (errno.EIO, 2), (errno.EMFILE, 4)])
def test_an_operation_fails_once(
    served: FakeHub, make_store: MakeStore, tmp_path: Path, folder_files: dict[str, bytes], code: int, first: int, step: int
) -> None:
    """The error is typed, nothing wrong is listed, and the same Store pulls well right after."""
    count = len(operations(served, make_store, tmp_path))
    assert count > 100
    failed = 0
    for k in range(first % step, count, step):
        layer = FaultLayer(fail_at=k, code=code)
        store = make_store(served, root=tmp_path / f"s{k}", layer=layer)
        try:
            pull(store)
        except CavectlError as error:
            failed += 1
            assert error.code == ("no_space" if code == errno.ENOSPC else "store_error"), (k, layer.log[k])
        layer.fail_at = None
        check_absent_or_complete(store, folder_files)
        pull(store)
        assert check_absent_or_complete(store, folder_files)
    assert failed > count // step // 2


def test_full_disk_for_good(served: FakeHub, make_store: MakeStore, tmp_path: Path, folder_files: dict[str, bytes]) -> None:
    """From operation k on every write fails: no_space, no bytes left behind by this pull's own file, and later it works."""
    log = operations(served, make_store, tmp_path)
    writes = [k for k, name in enumerate(log) if name == "write"]
    for k in writes[:: max(1, len(writes) // 8)]:
        layer = FaultLayer(fail_at=k, code=errno.ENOSPC)
        store = make_store(served, root=tmp_path / f"s{k}", layer=layer)
        with pytest.raises(CavectlError) as caught:
            pull(store)
        assert caught.value.code == "no_space" and store.list() == []
        layer.fail_at = None
        pull(store)
        assert check_absent_or_complete(store, folder_files) and leftovers(store.root) == []


CHILD = """
import asyncio, sys
from pathlib import Path
from daemon.store import Store
from daemon.store.catalog import Catalog
from tests.daemon.store.quick import QUICK, LocalInspector
from tests.fixtures.fault_fs import FaultLayer
layer = FaultLayer(exit_at=int(sys.argv[3]) if sys.argv[3] else None)
store = Store(Path(sys.argv[1]), Catalog(()), sys.argv[2], settings=QUICK, inspector=LocalInspector(), layer=layer)
print("ready", flush=True)
asyncio.run(store.pull("hf.co/Tiny/Llama", lambda event: None))
"""


def child(store: Store, hub: FakeHub, exit_at: int | str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(store.root), hub.endpoint, str(exit_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def forked(served: FakeHub, root: Path, k: int) -> int:
    """Pulls in a forked child that is gone before operation k; gives its exit code. (Forking spares the imports.)"""
    pid = os.fork()
    if pid == 0:
        try:
            from daemon.store.catalog import Catalog
            from tests.daemon.store.quick import QUICK, LocalInspector

            layer = FaultLayer(exit_at=k)
            pull(Store(root, Catalog(()), served.endpoint, settings=QUICK, inspector=LocalInspector(), layer=layer))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(400)
def test_gone_before_each_operation(served: FakeHub, make_store: MakeStore, tmp_path: Path, folder_files: dict[str, bytes]) -> None:
    """The process ends before operation k: absent or complete, a new process goes on. Every ninth, and the last 24."""
    count = len(operations(served, make_store, tmp_path))
    outcomes = set()
    for k in sorted({*range(0, count, 9), *range(count - 24, count)}):
        root = tmp_path / f"s{k}"
        assert forked(served, root, k) == EXIT_CODE
        store = make_store(served, root=root)
        outcomes.add(check_absent_or_complete(store, folder_files))
        store.collect()
        pull(store)
        assert check_absent_or_complete(store, folder_files)
        assert [entry for entry in leftovers(root) if not entry.startswith("staging/")] == []
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "rounds", [pytest.param(15, id="15"), pytest.param(200, id="200", marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_kill_9_at_random_times(
    served: FakeHub, make_store: MakeStore, tmp_path: Path, folder_files: dict[str, bytes], rounds: int
) -> None:
    """Over one store: a pull is killed, the next goes on; once complete it is removed, and it begins again."""
    served.bytes_per_second = 1.5e6
    store, luck, completed = make_store(served), random.Random(7), 0
    for _ in range(rounds):
        process = child(store, served)
        assert process.stdout
        process.stdout.readline()
        time.sleep(luck.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if check_absent_or_complete(store, folder_files):
            completed += 1
            store.remove(NAME)
    served.bytes_per_second = 0
    served.log.clear()
    pull(store)
    assert check_absent_or_complete(store, folder_files)
    assert served.sent() <= sum(map(len, folder_files.values()))
    print(f"{rounds} kills, {completed} pulls were complete")


def test_resume_after_kill_fetches_at_most_one_chunk_again(
    served: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], gguf: bytes
) -> None:
    size = len(gguf)
    served.add("Tiny/Llama", {"m.gguf": gguf})
    served.bytes_per_second = 1e6
    store = make_store(served)
    process = child(store, served)
    deadline = time.monotonic() + 30
    while served.sent() < 900_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    (data,) = store.root.glob("partial/*~*/data")
    here = data.stat().st_size
    assert 500_000 < here < size
    served.bytes_per_second = 0
    served.log.clear()
    pull(store)
    assert served.sent("/blob/") == size - here and store.get(NAME).weights.read_bytes() == gguf


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here ({mount.stderr.decode().strip()}); the fault layer covers ENOSPC")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_real_full_disk(
    served: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], gguf: bytes, small_disk: Path
) -> None:
    from tests.fixtures.fault_fs import FaultLayer

    class Optimist(FaultLayer):
        """Says that there is space, so that the write itself meets the full disk."""

        def free_bytes(self, path: Path) -> int:
            return 1 << 40

    served.add("Tiny/Big", {"m.gguf": gguf})
    root = small_disk / "store"
    with pytest.raises(CavectlError, match=r"need 1\.5 MB, have") as caught:
        asyncio.run(make_store(served, root=root).pull("hf.co/Tiny/Big", lambda _: None))
    assert caught.value.code == "no_space"
    store = make_store(served, root=root, layer=Optimist())
    with pytest.raises(CavectlError) as caught:
        asyncio.run(store.pull("hf.co/Tiny/Big", lambda _: None))
    assert caught.value.code == "no_space" and store.list() == [] and leftovers(root) == []
    pull(store)  # the small one fits, without a restart
    assert check_absent_or_complete(store, folder_files)
    import_source = write_files(small_disk.parent / "src", {"m.gguf": gguf}) / "m.gguf"
    with pytest.raises(CavectlError) as caught:
        asyncio.run(store.import_path(import_source, "mine", "copy"))
    assert caught.value.code == "no_space" and leftovers(root) == []
