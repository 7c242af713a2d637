"""Several pulls at once: in one process (shared), in several (private names, one rename), with gc running. Rows B26 and S33."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from daemon.store import ModelRecord, PullEvent, Store
from engine.errors import CavectlError
from tests.daemon.store.conftest import leftovers
from tests.fixtures.fake_hub import FakeHub, Fault

MakeStore = Callable[..., Store]
NAME = "hf.co/Tiny/Llama-GGUF"


@pytest.fixture
def served(hub: FakeHub, gguf: bytes) -> FakeHub:
    hub.add("Tiny/Llama-GGUF", {"m.gguf": gguf})
    return hub


def start(store: Store, name: str = NAME, progress: Callable[[PullEvent], None] = lambda _: None) -> asyncio.Future[ModelRecord]:
    return asyncio.ensure_future(store.pull(name, progress))


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():
            await asyncio.sleep(0.005)


def test_one_download_for_all_waiters(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.bytes_per_second = 5e6
    store = make_store(served)
    seen: list[list[int]] = [[] for _ in range(8)]

    async def run() -> None:
        names = [NAME if i % 2 else f"{NAME}:m.gguf" for i in range(8)]
        pulls = [start(store, name, lambda event, i=i: seen[i].append(event.completed)) for i, name in enumerate(names)]
        await asyncio.gather(*pulls)

    asyncio.run(run())
    assert served.sent() == len(gguf) and len(store.list()) == 2
    assert all(len(gguf) in completed for completed in seen)
    assert leftovers(store.root) == []


def test_cancelled_waiter_leaves_the_others_alone(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.bytes_per_second = 3e6
    store = make_store(served)

    async def run() -> None:
        pulls = [start(store) for _ in range(3)]
        await until(lambda: served.sent() > 300_000)
        pulls[0].cancel()  # the one that began it
        pulls[1].cancel()
        await asyncio.wait(pulls[:2])
        assert pulls[0].cancelled() and pulls[1].cancelled()
        await pulls[2]

    asyncio.run(run())
    assert served.sent() == len(gguf) and store.get(NAME).weights.read_bytes() == gguf


def test_all_cancelled_keeps_the_partial(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.bytes_per_second = 3e6
    store = make_store(served)

    async def run() -> None:
        pulls = [start(store) for _ in range(3)]
        await until(lambda: served.sent() > 700_000)
        for pull in pulls:
            pull.cancel()
        await asyncio.wait(pulls)
        assert all(pull.cancelled() for pull in pulls)
        assert len(leftovers(store.root)) == 1 and "~" not in leftovers(store.root)[0]
        served.bytes_per_second = 0
        await start(store)

    asyncio.run(run())
    assert served.requests("/blob/")[-1].headers["Range"]
    assert store.get(NAME).weights.read_bytes() == gguf and leftovers(store.root) == []


def test_new_pull_while_the_last_waiter_is_leaving(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.bytes_per_second = 3e6
    store = make_store(served)

    async def run() -> None:
        for _ in range(3):
            pull = start(store)
            sent = served.sent()
            await until(lambda sent=sent: served.sent() > sent + 300_000)
            pull.cancel()
        await start(store)

    asyncio.run(run())
    assert store.get(NAME).weights.read_bytes() == gguf and leftovers(store.root) == []


def test_failure_reaches_all_and_the_next_pull_is_a_new_one(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.faults += [Fault("flip", "/blob/", at=1000)]
    store = make_store(served)

    async def run() -> Sequence[object]:
        failed = await asyncio.gather(*(start(store) for _ in range(4)), return_exceptions=True)
        await start(store)
        return failed

    errors = asyncio.run(run())
    assert {error.code for error in errors if isinstance(error, CavectlError)} == {"hash_mismatch"} and len(errors) == 4
    assert store.get(NAME).weights.read_bytes() == gguf


PROCESS = """
import asyncio, fcntl, os, sys
from pathlib import Path
from daemon.store import Store
from daemon.store.catalog import Catalog
from tests.daemon.store.quick import QUICK, LocalInspector
if sys.argv[3] == "no-locks":
    fcntl.flock = lambda fd, operation: None
store = Store(Path(sys.argv[1]), Catalog(()), sys.argv[2], settings=QUICK, inspector=LocalInspector())
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(store.pull("hf.co/Tiny/Llama-GGUF", lambda event: None))
print(store.get("hf.co/Tiny/Llama-GGUF").digest, flush=True)
"""


@pytest.mark.parametrize("locks", ["locks", "no-locks"])
def test_four_pulls_here_and_four_processes(
    served: FakeHub, make_store: MakeStore, gguf: bytes, locks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if locks == "no-locks":
        import fcntl

        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    served.bytes_per_second = 3e6
    store = make_store(served)
    command = [sys.executable, "-c", PROCESS, str(store.root), served.endpoint, locks]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout and process.stdin and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()

        async def here() -> None:
            await asyncio.gather(*(start(store) for _ in range(4)))

        asyncio.run(here())
        ended = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, ended
    assert store.get(NAME).weights.read_bytes() == gguf and len(store.list()) == 1
    assert all(output.strip().startswith("sha256:") for output, _ in ended)
    assert len(served.requests("/blob/")) <= 5 and leftovers(store.root) == []


def test_two_processes_never_write_one_partial(
    served: FakeHub, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial whose owner lives is not taken, locks or not; one whose owner is gone is."""
    import fcntl

    from daemon.store.files import FileLayer
    from daemon.store.names import parse_model_name
    from daemon.store.partials import Checksum, Partials, WantedFile
    from daemon.store.paths import StorePaths

    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    partials = Partials(FileLayer(), StorePaths(tmp_path))
    wanted, name = WantedFile("f", 100, Checksum("sha256", "0" * 64)), parse_model_name("a:b")
    first, second = partials.claim(wanted, name), partials.claim(wanted, name)
    first.write(b"x" * 10)
    assert not second.resumed and len(list((tmp_path / "partial").iterdir())) == 2
    first.close()  # as a killed process leaves it
    (held,) = [path for path in (tmp_path / "partial").iterdir() if path.joinpath("data").stat().st_size]
    pid = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    held.rename(held.with_name(held.name.partition("~")[0] + f"~{pid}-1-0123456789abcdef"))
    third = partials.claim(wanted, name)
    while third.hash_more(1 << 20):
        pass
    assert third.resumed and third.size == 10
    second.close()
    third.close()


def test_lock_of_another_container_is_respected(tmp_path: Path) -> None:
    """Its pid means nothing here, so only the lock says that it lives."""
    import fcntl

    from daemon.store.files import FileLayer
    from daemon.store.names import parse_model_name
    from daemon.store.partials import Checksum, Partials, WantedFile
    from daemon.store.paths import StorePaths

    partials = Partials(FileLayer(), StorePaths(tmp_path))
    wanted, name = WantedFile("f", 100, Checksum("sha256", "0" * 64)), parse_model_name("a:b")
    first = partials.claim(wanted, name)
    first.write(b"x" * 10)
    first.close()
    (folder,) = (tmp_path / "partial").iterdir()
    folder = folder.rename(folder.with_name(folder.name.partition("~")[0] + "~1-1-0123456789abcdef"))
    other = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = partials.claim(wanted, name)
        assert not second.resumed and second.size == 0
        assert partials.collect(older_than_s=0) == 0
    finally:
        os.close(other)
    second.drop()
    third = partials.claim(wanted, name)
    assert third.resumed
    third.close()


@pytest.mark.parametrize(
    "rounds", [pytest.param(30, id="30"), pytest.param(200, id="200", marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_pull_and_gc_together(served: FakeHub, make_store: MakeStore, gguf: bytes, rounds: int) -> None:
    """gc without any age guard, as often as it can, while a model is pulled and removed."""
    store = make_store(served)

    async def run() -> None:
        done = False

        async def collect() -> None:
            while not done:
                await asyncio.to_thread(store.collect, older_than_s=0)

        gc = asyncio.ensure_future(collect())
        for _ in range(rounds):
            await start(store)
            assert store.get(NAME).files[0].size == len(gguf)
            store.remove(NAME)
        done = True
        await gc

    asyncio.run(run())
    assert store.list() == [] and leftovers(store.root) == []
