"""Models on disk: visible or not, modes, damage, removal, broken manifests. Rows S05, S06, S33, B25 and the corrupted-state fault
row.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.store import Store
from engine.errors import CavectlError
from tests.daemon.store.conftest import leftovers, tree
from tests.fixtures.fake_hub import FakeHub, Fault

MakeStore = Callable[..., Store]
NAME = "hf.co/Tiny/Llama-GGUF"


def pull(store: Store, name: str = NAME) -> None:
    asyncio.run(store.pull(name, lambda _: None))


def code_of(work: Callable[[], object]) -> str:
    with pytest.raises(CavectlError) as caught:
        work()
    assert "\n" not in caught.value.message
    return caught.value.code


@pytest.fixture
def served(hub: FakeHub, gguf: bytes) -> FakeHub:
    hub.add("Tiny/Llama-GGUF", {"m.gguf": gguf})
    return hub


@pytest.fixture
def pulled(served: FakeHub, make_store: MakeStore) -> Store:
    store = make_store(served)
    pull(store)
    return store


def test_modes_are_private_whatever_the_umask(served: FakeHub, make_store: MakeStore) -> None:
    old = os.umask(0)
    try:
        store = make_store(served)
        pull(store)
    finally:
        os.umask(old)
    for path in [store.root, *store.root.rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_empty_store_is_an_empty_list(make_store: MakeStore) -> None:
    store = make_store()
    assert store.list() == [] and not store.root.exists()


def test_unknown_model_has_a_hint(pulled: Store) -> None:
    with pytest.raises(CavectlError) as caught:
        pulled.get("hf.co/Tiny/Lama-GGUF")
    assert caught.value.code == "model_not_found" and "cavectl pull" in caught.value.hint
    store = Store(pulled.root)
    with pytest.raises(CavectlError) as caught:
        store.get("smolm2:135m")
    assert caught.value.hint == "did you mean smollm2:135m?"
    with pytest.raises(CavectlError) as caught:
        pull(store, "nobody-knows")
    assert caught.value.code == "model_not_found" and "hf.co/owner/repo" in caught.value.hint
    assert all(name in caught.value.hint for name in store.catalog.names)
    with pytest.raises(CavectlError) as caught:
        pull(store, "smollm:135m")
    assert caught.value.hint == "did you mean smollm2:135m?"


def test_list_leaves_vocabularies_out(pulled: Store) -> None:
    assert pulled.list()[0].info.vocabulary is None and pulled.get(NAME).info.vocabulary is not None
    assert pulled.list()[0].digest == pulled.get(NAME).digest


def test_flipped_byte_on_disk(pulled: Store, served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    weights = pulled.get(NAME).weights
    asyncio.run(pulled.verify(NAME))
    with weights.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([gguf[1000] ^ 1]))
    with pytest.raises(CavectlError, match=r"m\.gguf") as caught:
        asyncio.run(pulled.verify(NAME))
    assert caught.value.code == "hash_mismatch" and "cavectl pull" in caught.value.hint
    store = make_store(served)
    assert code_of(lambda: store.get(NAME)) == "hash_mismatch" and store.list()[0].damaged == ("m.gguf",)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf and leftovers(store.root) == []


def test_repair_fetches_only_the_bad_file(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    hub.add("Tiny/Llama", folder_files)
    store = make_store(hub)
    pull(store, "hf.co/Tiny/Llama")
    store.get("hf.co/Tiny/Llama").root.joinpath("tokenizer.json").write_bytes(b'{"version": "1.1"}')
    assert code_of(lambda: asyncio.run(store.verify("hf.co/Tiny/Llama"))) == "hash_mismatch"
    hub.log.clear()
    pull(store, "hf.co/Tiny/Llama")
    assert hub.sent() == len(folder_files["tokenizer.json"])


def test_missing_and_short_files_are_found_at_get(pulled: Store) -> None:
    weights = pulled.get(NAME).weights
    os.truncate(weights, 100)
    assert code_of(lambda: pulled.get(NAME)) == "hash_mismatch"
    weights.unlink()
    assert code_of(lambda: pulled.get(NAME)) == "store_error"
    pull(pulled)
    assert pulled.get(NAME).weights == weights


def test_verify_writes_lost_facts_anew(pulled: Store) -> None:
    facts = pulled.get(NAME).root / "info.msgpack"
    for data in (b"", facts.read_bytes()[:500], bytes(2000)):
        facts.write_bytes(data)
        assert code_of(lambda: pulled.get(NAME)) == "corrupt_file"
        asyncio.run(pulled.verify(NAME))
        assert pulled.get(NAME).info.vocabulary is not None
    facts.unlink()
    asyncio.run(pulled.verify(NAME))
    assert pulled.get(NAME).info.format == "gguf"


def _mutate(data: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(data), **changes}).encode()


@pytest.mark.parametrize(
    "broken",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: b"[" * 100_000,
        lambda data: _mutate(data, format=99),
        lambda data: _mutate(data, name="sha256:../../x"),
        lambda data: _mutate(data, name="hf.co/other/model:x"),
        lambda data: _mutate(data, weights="../../../../etc/passwd"),
        lambda data: _mutate(data, files=[{"name": "../../x", "size": 1, "sha256": ""}]),
        lambda data: _mutate(data, surprise=1),
    ],
)
def test_broken_manifest_costs_its_model_alone(
    pulled: Store, served: FakeHub, other_gguf: bytes, broken: Callable[[bytes], bytes]
) -> None:
    served.add("Tiny/Other", {"o.gguf": other_gguf})
    pull(pulled, "hf.co/Tiny/Other")
    record = pulled.get(NAME)
    manifest = record.root / "manifest.json"
    manifest.write_bytes(broken(manifest.read_bytes()))
    assert [model.name for model in pulled.list()] == ["hf.co/Tiny/Other:latest"]
    assert code_of(lambda: pulled.get(NAME)) in ("corrupt_file", "model_not_found")
    pulled.collect(older_than_s=0)
    assert record.weights.exists()
    served.log.clear()
    pull(pulled)
    assert served.sent() == 0  # the bytes that were there are taken after hashing
    assert pulled.get(NAME).digest and len(pulled.list()) == 2


def test_every_link_in_a_model_folder_is_left_alone(pulled: Store, tmp_path: Path) -> None:
    """rm of a model into which somebody put a link: neither the link's target nor a stray file is touched."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    record = pulled.get(NAME)
    record.weights.unlink()
    record.weights.symlink_to(outside / "precious")
    (record.root / "dir").symlink_to(outside)
    (record.root / "note.txt").write_text("mine")
    pulled.remove(NAME)
    assert tree(outside) == {"precious": b"x"} and pulled.list() == []
    (kept,) = (pulled.root / "kept").iterdir()
    assert {path.name for path in kept.iterdir()} == {"m.gguf", "dir", "note.txt"}


def test_hostile_manifest_unlinks_nothing_outside(pulled: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    manifest = pulled.get(NAME).root / "manifest.json"
    data = json.loads(manifest.read_bytes())
    data["files"].append({"name": "../" * 5 + "victim", "size": 1, "sha256": "0" * 64})
    manifest.write_text(json.dumps(data))
    pulled.remove(NAME)
    assert victim.exists() and pulled.list() == []
    (kept,) = (pulled.root / "kept").iterdir()
    assert (kept / "m.gguf").exists()  # nothing trustworthy says whose it is


@pytest.mark.parametrize("data", [b"", b"{"])
def test_a_model_without_a_readable_manifest_is_removed(pulled: Store, data: bytes) -> None:
    manifest = pulled.get(NAME).root / "manifest.json"
    manifest.write_bytes(data)
    assert pulled.remove(NAME.upper()).casefold() == f"{NAME}:latest".casefold()
    assert not manifest.exists() and code_of(lambda: pulled.get(NAME)) == "model_not_found"


def test_remove_leaves_nothing(pulled: Store) -> None:
    pulled.remove("HF.CO/tiny/llama-gguf")
    assert pulled.list() == [] and leftovers(pulled.root) == []
    assert list((pulled.root / "models").iterdir()) == []
    assert code_of(lambda: pulled.remove(NAME)) == "model_not_found"


def test_bytes_shared_by_two_models_outlive_one(pulled: Store, served: FakeHub, gguf: bytes) -> None:
    pull(pulled, f"{NAME}:m.gguf")
    assert served.sent() == len(gguf)
    pulled.remove(NAME)
    assert pulled.get(f"{NAME}:m.gguf").weights.read_bytes() == gguf


def test_half_removed_model_is_finished(pulled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between hiding a model and unlinking its files: the next start finishes it."""
    record = pulled.get(NAME)
    removed = pulled.root / "removed"
    removed.mkdir(exist_ok=True)
    record.root.rename(removed / "token")
    assert pulled.list() == []
    pulled.collect()
    assert leftovers(pulled.root) == []


def test_staging_of_the_dead_is_cleared_and_of_the_living_kept(pulled: Store) -> None:
    from daemon.store.owners import new_owner

    staging = pulled.root / "staging"
    dead, living = staging / "1-1-0123456789abcdef", staging / str(new_owner())
    for folder in (dead, living):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "x").write_bytes(b"x")
        (folder / "link").symlink_to("/etc")
    pulled.collect(older_than_s=0)
    assert dead.exists()  # an owner in another container looks dead: an hour's grace
    for folder in (dead, living):
        os.utime(folder, (1, 1))
    pulled.collect(older_than_s=0)
    assert not dead.exists() and living.exists() and Path("/etc/hostname").exists()


def test_store_under_a_file(tmp_path: Path, make_store: MakeStore, served: FakeHub) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = make_store(served, root=tmp_path / "file" / "store")
    assert store.list() == []
    assert code_of(lambda: pull(store)) == "store_error"


def test_no_descriptor_is_left_open(served: FakeHub, make_store: MakeStore) -> None:
    def pulls(store: Store) -> None:
        pull(store)
        store.get(NAME)
        served.faults.append(Fault("status", "/api/", status=404))
        code_of(lambda: pull(store))
        store.remove(NAME)
        served.faults.append(Fault("flip", "/blob/", at=9))
        code_of(lambda: pull(store))
        store.collect(older_than_s=0)

    pulls(make_store(served))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pulls(make_store(served))
    time.sleep(0.2)  # the server's side of the last connection
    assert len(os.listdir("/proc/self/fd")) <= before + 1
