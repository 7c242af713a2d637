"""Pulling from a hub, sound and faulty: rows S02, S04, S05, S11, B23, B24, B25 and the hub's fault rows."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path

import pytest

from daemon.store import PullEvent
from engine.errors import CavectlError
from tests.daemon.store.conftest import leftovers
from tests.daemon.store.pulling import FILE, NAME, MakeStore, pull, refused, sha256
from tests.daemon.store.quick import QUICK
from tests.fixtures.fake_hub import FakeHub, Fault


def test_pull_gguf(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    store = make_store(served)
    events = pull(store)
    record = store.get("HF.co/tiny/llama-gguf:LATEST")
    assert record.weights.read_bytes() == gguf
    assert record.weights.name == FILE and record.weights.parent == record.root
    assert (record.name, record.licence) == (f"{NAME}:latest", "apache-2.0")
    assert record.source == f"hf.co/Tiny/Llama-GGUF@{record.revision}" and len(record.revision) == 40
    assert record.files[0].sha256 == sha256(gguf) and record.info.format == "gguf" and record.info.vocabulary is not None
    statuses = [event.status for event in events]
    assert statuses[0] == "pulling manifest" and statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    progress = [event for event in events if event.file == FILE]
    assert [event.completed for event in progress] == sorted(event.completed for event in progress)
    assert progress[-1].completed == progress[-1].total == len(gguf) and progress[-1].digest == f"sha256:{sha256(gguf)}"
    assert leftovers(store.root) == []


def test_pull_again_fetches_nothing(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    store = make_store(served)
    pull(store)
    pull(store)
    assert served.sent() == len(gguf)


def test_quant_selector_and_shared_bytes(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    store = make_store(served)
    pull(store, f"{NAME}:Q8_0")
    assert store.get(f"{NAME}:q8_0").weights.name == "llama-Q8_0.gguf"
    pull(store)
    pull(store, f"{NAME}:{FILE}")
    assert served.sent() == 2 * len(gguf)  # the third is linked from the second
    assert [record.name for record in store.list()] == [f"{NAME}:Q8_0", f"{NAME}:latest", f"{NAME}:{FILE}"]
    store.remove(NAME)
    assert store.get(f"{NAME}:{FILE}").weights.read_bytes() == gguf


def test_pull_folder_takes_no_pickle_and_no_code(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    evil = {
        "pytorch_model.bin": b"\x80\x04.",
        "modeling_evil.py": b"open('canary', 'w')",
        "extra.pt": b"\x80",
        "onnx/model.onnx": b"x",
    }
    hub.add("Tiny/Llama", folder_files | evil)
    store = make_store(hub)
    pull(store, "hf.co/Tiny/Llama")
    record = store.get("hf.co/Tiny/Llama")
    assert record.weights == record.root and record.info.format == "safetensors"
    assert {f.name for f in record.files} == set(folder_files)
    for name, data in folder_files.items():
        assert record.root.joinpath(name).read_bytes() == data
    assert not any(entry.path.endswith((".bin", ".py", ".pt", ".onnx")) for entry in hub.log)


def test_pull_shards(hub: FakeHub, make_store: MakeStore, sharded_files: dict[str, bytes]) -> None:
    hub.add("Tiny/Shards", sharded_files)
    store = make_store(hub)
    pull(store, "hf.co/Tiny/Shards")
    assert len(store.get("hf.co/Tiny/Shards").files) == len(sharded_files)


def test_missing_shards_are_all_named_before_a_byte_comes(
    hub: FakeHub, make_store: MakeStore, sharded_files: dict[str, bytes]
) -> None:
    gone = ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    hub.add("Tiny/Shards", {name: data for name, data in sharded_files.items() if name not in gone})
    error = refused(make_store(hub), "hf.co/Tiny/Shards")
    assert error.code == "corrupt_file" and all(name in error.message for name in gone)
    assert hub.sent() == 0


def test_only_pickles(hub: FakeHub, make_store: MakeStore) -> None:
    hub.add("Tiny/Old", {"config.json": b"{}", "pytorch_model.bin": b"\x80"})
    error = refused(make_store(hub), "hf.co/Tiny/Old")
    assert error.code == "unsupported_model" and "pickle" in error.message and hub.sent() == 0


def test_new_commit_replaces_the_old_one(served: FakeHub, make_store: MakeStore, other_gguf: bytes) -> None:
    store = make_store(served)
    pull(store)
    old = store.get(NAME)
    served.add("Tiny/Llama-GGUF", {FILE: other_gguf})
    pull(store)
    new = store.get(NAME)
    assert new.revision != old.revision and not old.root.exists() and len(store.list()) == 1
    assert leftovers(store.root) == []


def test_branch_moved_in_mid_pull(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    """All files of one pull are of the commit that it began with."""
    hub.add("Tiny/Llama", folder_files)
    moved = False

    def move(event: PullEvent) -> None:
        nonlocal moved
        if event.file and not moved:
            moved = True
            hub.add("Tiny/Llama", folder_files | {"tokenizer.json": b'{"version": "2"}'})

    store = make_store(hub)
    asyncio.run(store.pull("hf.co/Tiny/Llama", move))
    assert moved and store.get("hf.co/Tiny/Llama").root.joinpath("tokenizer.json").read_bytes() == folder_files["tokenizer.json"]


# --- resume (B23)


def test_resume_within_a_pull(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.faults += [Fault("cut", "/blob/", at=len(gguf) * 2 // 5), Fault("cut", "/blob/", at=100_000)]
    store = make_store(served)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf
    ranges = [entry.headers.get("Range") for entry in served.requests("/blob/")]
    assert ranges[0] is None and all(ranges[1:]) and len(ranges) == 3


def test_resume_after_a_restart_fetches_at_most_one_chunk_again(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    cut = len(gguf) * 2 // 5
    served.faults += [Fault("cut", "/blob/", at=cut), Fault("status", "/blob/", status=503, times=9)]
    assert refused(make_store(served)).code == "network_error"
    assert len(leftovers(make_store(served).root)) == 1
    assert served.sent("/blob/") == cut
    served.faults.clear()
    store = make_store(served)
    pull(store)
    assert served.requests("/blob/")[-1].headers["Range"] == f"bytes={cut - cut % (256 << 10)}-"
    assert store.get(NAME).weights.read_bytes() == gguf
    assert len(gguf) <= served.sent("/blob/") <= len(gguf) + (256 << 10)
    assert leftovers(store.root) == []


def _leave_partial(hub: FakeHub, make_store: MakeStore, gguf: bytes) -> Path:
    """A partial of 300,000 bytes, as a killed pull leaves it; gives its data file."""
    store = make_store(hub, settings=dataclasses.replace(QUICK))
    hub.faults += [Fault("cut", "/blob/", at=300_000), Fault("status", "/blob/", status=503, times=9)]
    refused(store)
    hub.faults.clear()
    hub.log.clear()
    (data,) = store.root.joinpath("partial").glob("*/data")
    assert 0 < data.stat().st_size <= 300_000 and gguf.startswith(data.read_bytes())
    return data


def test_etag_changed_restarts(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    _leave_partial(served, make_store, gguf)
    served.faults += [Fault("etag", "/blob/")]
    store = make_store(served)
    pull(store)
    first = served.requests("/blob/")[0]
    assert first.headers["Range"] and first.headers["If-Range"] and first.status == 200
    assert store.get(NAME).weights.read_bytes() == gguf


def test_200_for_range_restarts(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    _leave_partial(served, make_store, gguf)
    served.faults += [Fault("ignore-range", "/blob/")]
    store = make_store(served)
    pull(store)
    assert served.requests("/blob/")[0].headers["Range"] and store.get(NAME).weights.read_bytes() == gguf


def test_wrong_content_range_is_not_believed(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    _leave_partial(served, make_store, gguf)
    served.faults += [Fault("wrong-range", "/blob/", at=1)]
    store = make_store(served)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf


def test_partial_longer_than_the_file(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    data = _leave_partial(served, make_store, gguf)
    data.write_bytes(gguf + b"more")
    store = make_store(served)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf


def test_bad_bytes_in_a_partial_restart_it(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    """A power cut may leave holes: the hash at the end finds them, and the file is fetched once more from the start."""
    data = _leave_partial(served, make_store, gguf)
    data.write_bytes(bytes(data.stat().st_size))
    store = make_store(served)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf


def test_planted_file_of_the_right_size_is_no_hit(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    data = _leave_partial(served, make_store, gguf)
    data.write_bytes(bytes(len(gguf)))
    store = make_store(served)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf


def test_partials_expire_by_age(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    data = _leave_partial(served, make_store, gguf)
    store = make_store(served)
    assert store.collect() == 0 and data.exists()
    old = time.time() - 8 * 86400
    for path in (data, data.with_name("meta.json"), data.parent):
        os.utime(path, (old, old))
    assert store.collect() > 0 and leftovers(store.root) == []


def test_remove_frees_what_a_cut_pull_left(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    _leave_partial(served, make_store, gguf)
    store = make_store(served)
    store.remove(NAME)
    assert leftovers(store.root) == []
    with pytest.raises(CavectlError, match="not here"):
        store.remove(NAME)


# --- space (B24)


def test_preflight_says_need_and_have(served: FakeHub, make_store: MakeStore) -> None:
    settings = dataclasses.replace(QUICK, headroom_bytes=1 << 60)
    error = refused(make_store(served, settings=settings))
    assert error.code == "no_space" and "need 1152921" in error.message and ", have " in error.message
    assert served.sent() == 0
