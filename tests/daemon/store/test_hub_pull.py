"""Pulling from a hub, sound and faulty: rows S02, S04, S05, S11, B23, B24, B25 and the hub's fault rows."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.store import PullEvent, Store
from daemon.store.catalog import parse_catalog
from engine.errors import CavectlError
from tests.daemon.store.conftest import leftovers, tree
from tests.daemon.store.quick import QUICK
from tests.fixtures.fake_hub import FakeHub, Fault

MakeStore = Callable[..., Store]
NAME = "hf.co/Tiny/Llama-GGUF"
FILE = "llama-Q4_K_M.gguf"


def pull(store: Store, name: str = NAME) -> list[PullEvent]:
    events: list[PullEvent] = []
    asyncio.run(store.pull(name, events.append))
    return events


def refused(store: Store, name: str = NAME) -> CavectlError:
    with pytest.raises(CavectlError) as caught:
        pull(store, name)
    assert store.list() == []
    return caught.value


@pytest.fixture
def served(hub: FakeHub, gguf: bytes, other_gguf: bytes) -> FakeHub:
    hub.add("Tiny/Llama-GGUF", {FILE: gguf, "llama-Q8_0.gguf": other_gguf, "README.md": b"# Tiny"})
    return hub


def blob(gguf: bytes) -> str:
    return hashlib.sha256(gguf).hexdigest()


def test_pull_gguf(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    store = make_store(served)
    events = pull(store)
    record = store.get("HF.co/tiny/llama-gguf:LATEST")
    assert record.weights.read_bytes() == gguf
    assert record.weights.name == FILE and record.weights.parent == record.root
    assert (record.name, record.licence) == (f"{NAME}:latest", "apache-2.0")
    assert record.source == f"hf.co/Tiny/Llama-GGUF@{record.revision}" and len(record.revision) == 40
    assert record.files[0].sha256 == blob(gguf) and record.info.format == "gguf" and record.info.vocabulary is not None
    statuses = [event.status for event in events]
    assert statuses[0] == "pulling manifest" and statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    progress = [event for event in events if event.file == FILE]
    assert [event.completed for event in progress] == sorted(event.completed for event in progress)
    assert progress[-1].completed == progress[-1].total == len(gguf) and progress[-1].digest == f"sha256:{blob(gguf)}"
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


# --- wrong bytes (S05, B25)


def test_flipped_byte(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    hub.add("Tiny/Llama", folder_files)
    hub.faults += [Fault("flip", "/blob/", at=5000)]
    store = make_store(hub)
    error = refused(store, "hf.co/Tiny/Llama")
    assert error.code == "hash_mismatch" and "model.safetensors" in error.message
    hub.log.clear()
    pull(store, "hf.co/Tiny/Llama")
    assert hub.sent() == len(folder_files["model.safetensors"])  # the small files are kept


def test_flipped_byte_in_a_git_file(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    hub.add("Tiny/Llama", folder_files)
    hub.faults += [Fault("flip", "config.json", at=5)]
    error = refused(make_store(hub), "hf.co/Tiny/Llama")
    assert error.code == "hash_mismatch" and "config.json" in error.message


def test_html_login_page(served: FakeHub, make_store: MakeStore) -> None:
    served.faults += [Fault("html", "/blob/")]
    error = refused(make_store(served))
    assert error.code == "hash_mismatch" and FILE in error.message


@pytest.mark.parametrize("body", [b"short", b"x" * 2_000_000])
def test_wrong_length(served: FakeHub, make_store: MakeStore, body: bytes) -> None:
    served.faults += [Fault("body", "/blob/", body=body)]
    error = refused(make_store(served))
    assert error.code == "hash_mismatch" and FILE in error.message


def test_gzip_is_refused(served: FakeHub, make_store: MakeStore) -> None:
    served.faults += [Fault("gzip", "/blob/")]
    assert "compressed" in refused(make_store(served)).message
    assert served.requests("/blob/")[0].headers["Accept-Encoding"] == "identity"


def test_endless_body_for_a_file_stops_at_its_size(served: FakeHub, make_store: MakeStore) -> None:
    served.faults += [Fault("endless", "/blob/")]
    error = refused(make_store(served))
    assert error.code == "hash_mismatch" and served.sent("/blob/") < 16 << 20


# --- the description (S02, S04)


@pytest.mark.timing
def test_endless_description(served: FakeHub, make_store: MakeStore) -> None:
    served.faults += [Fault("endless", "/api/")]
    started = time.monotonic()
    assert "larger than 8 MiB" in refused(make_store(served)).message
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"sha": 1}', b"[" * 100_000, b'{"sha": "../../x", "siblings": []}', b"\xff\xfe", b"<html>"]
)
def test_description_that_makes_no_sense(served: FakeHub, make_store: MakeStore, body: bytes) -> None:
    served.faults += [Fault("body", "/api/", body=body)]
    assert refused(make_store(served)).code == "network_error"


@pytest.mark.parametrize(
    "name", ["../../.bashrc", "/etc/x", "a\\..\\b", "C:x", "\\\\h\\s", "a/./b", "a//b", "a\0b.gguf", "x" * 300, "d/" * 17 + "f"]
)
def test_hostile_file_name(hub: FakeHub, make_store: MakeStore, tmp_path: Path, name: str) -> None:
    entry = {"rfilename": name, "size": 4, "blobId": "0" * 40, "lfs": {"sha256": "0" * 64, "size": 4}}
    hub.add("Evil/Repo", {"model.gguf": b"GGUF"}, listed=[entry])
    before = tree(tmp_path)
    error = refused(make_store(hub), "hf.co/Evil/Repo")
    assert error.code == "invalid_name" and "name" in error.message and "\n" not in error.message
    assert {k: v for k, v in tree(tmp_path).items() if not k.startswith("store")} == before


@pytest.mark.parametrize("pair", [("config.json", "CONFIG.json"), ("model.safetensors", "MODEL.safetensors")])
def test_names_that_differ_in_case_only(
    hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], pair: tuple[str, str]
) -> None:
    """Only one of the two is a file of ours, so the other is simply not taken."""
    hub.add("Tiny/Llama", folder_files | {pair[1]: b"x"})
    store = make_store(hub)
    pull(store, "hf.co/Tiny/Llama")
    assert pair[1] not in {file.name for file in store.get("hf.co/Tiny/Llama").files}


def test_link_planted_in_the_store(served: FakeHub, make_store: MakeStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    store = make_store(served)
    store.root.joinpath("models").mkdir(parents=True)
    store.root.joinpath("models", "tiny").symlink_to(outside)
    assert refused(store).code in ("invalid_name", "store_error")
    assert list(outside.iterdir()) == []


def test_file_without_a_hash_is_not_taken(hub: FakeHub, make_store: MakeStore) -> None:
    hub.add("Tiny/Bare", {"model.gguf": b"GGUF"}, listed=[{"rfilename": "model.gguf", "size": 4}])
    assert refused(make_store(hub), "hf.co/Tiny/Bare").code == "hash_mismatch"


# --- answers that are no file


@pytest.mark.parametrize(
    ("status", "headers", "code"),
    [
        (401, {}, "hub_unauthorized"),
        (403, {"X-Error-Code": "GatedRepo"}, "hub_unauthorized"),
        (401, {"X-Error-Code": "RepoNotFound"}, "hub_not_found"),
        (404, {}, "hub_not_found"),
        (429, {"Retry-After": "3600"}, "hub_rate_limited"),
        (500, {}, "network_error"),
        (418, {}, "network_error"),
    ],
)
@pytest.mark.parametrize("path", ["/api/", "/resolve/", "/blob/"])
def test_status(served: FakeHub, make_store: MakeStore, status: int, headers: dict[str, str], code: str, path: str) -> None:
    served.faults += [Fault("status", path, status=status, headers=headers, times=99)]
    error = refused(make_store(served))
    assert error.code == code and error.message and "\n" not in error.message and "127.0.0.1:" not in error.message
    assert len([entry for entry in served.log if path in entry.path]) == (4 if status == 500 else 1)


def test_retry_after_is_honoured(served: FakeHub, make_store: MakeStore) -> None:
    served.faults += [Fault("status", "/resolve/", status=429, headers={"Retry-After": "1"})]
    started = time.monotonic()
    pull(make_store(served))
    assert time.monotonic() - started >= 1


def test_stall_is_a_timeout_and_resumes(served: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    served.faults += [Fault("stall", "/blob/", at=len(gguf) * 99 // 100)]
    store = make_store(served)
    pull(store)
    assert store.get(NAME).weights.read_bytes() == gguf


def test_nobody_listens(make_store: MakeStore) -> None:
    assert refused(make_store()).code == "network_error"


def test_unknown_quant_lists_what_there_is(served: FakeHub, make_store: MakeStore) -> None:
    error = refused(make_store(served), f"{NAME}:Q2_K")
    assert error.code == "hub_not_found" and FILE in error.hint


def test_gated_repo_and_token(hub: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    hub.token = "hf_secret"
    hub.add("Tiny/Gated", {"m.gguf": gguf}, needs_token=True)
    assert refused(make_store(hub), "hf.co/Tiny/Gated").code == "hub_unauthorized"
    store = make_store(hub, token="hf_secret")
    pull(store, "hf.co/Tiny/Gated")
    assert {entry.server for entry in hub.log if "Authorization" in entry.headers} == {"hub"}
    assert any(entry.server == "cdn" for entry in hub.log)


# --- space (B24)


def test_preflight_says_need_and_have(served: FakeHub, make_store: MakeStore) -> None:
    settings = dataclasses.replace(QUICK, headroom_bytes=1 << 60)
    error = refused(make_store(served, settings=settings))
    assert error.code == "no_space" and "need 1152921" in error.message and ", have " in error.message
    assert served.sent() == 0


# --- the Hugging Face cache


def cache_repo(cache: Path, repo: str, files: dict[str, bytes], lfs: set[str], commit: str) -> Path:
    """A cached repository as huggingface_hub lays it out; gives the snapshot folder."""
    from tests.fixtures.fake_hub import git_blob_id

    base = cache / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    base.joinpath("blobs").mkdir()
    for name, data in files.items():
        value = hashlib.sha256(data).hexdigest() if name in lfs else git_blob_id(data)
        base.joinpath("blobs", value).write_bytes(data)
        snapshot.joinpath(name).symlink_to(f"../../blobs/{value}")
    return snapshot


def test_cached_files_are_linked_not_fetched(
    hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("Tiny/Llama", folder_files)
    snapshot = cache_repo(tmp_path / "hf" / "hub", "Tiny/Llama", folder_files, {"model.safetensors"}, "0" * 40)
    settings = dataclasses.replace(QUICK, environ={"HF_HOME": str(tmp_path / "hf")})
    store = make_store(hub, settings=settings)
    pull(store, "hf.co/Tiny/Llama")
    weights = store.get("hf.co/Tiny/Llama").root / "model.safetensors"
    assert hub.sent() == 0 and weights.stat().st_ino == (snapshot / "model.safetensors").stat().st_ino
    store.remove("hf.co/Tiny/Llama")
    assert (snapshot / "model.safetensors").read_bytes() == folder_files["model.safetensors"]


def test_wrong_bytes_in_the_cache_are_fetched(
    hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("Tiny/Llama", folder_files)
    snapshot = cache_repo(tmp_path / "hf" / "hub", "Tiny/Llama", folder_files, {"model.safetensors"}, "0" * 40)
    weights = snapshot.joinpath("model.safetensors").resolve()
    bad = bytes(len(folder_files["model.safetensors"]))
    weights.write_bytes(bad)
    store = make_store(hub, settings=dataclasses.replace(QUICK, environ={"HF_HOME": str(tmp_path / "hf")}))
    pull(store, "hf.co/Tiny/Llama")
    assert store.get("hf.co/Tiny/Llama").root.joinpath("model.safetensors").read_bytes() == folder_files["model.safetensors"]
    assert weights.read_bytes() == bad  # never written to


# --- hub entries of the catalog


def test_catalog_entry_on_the_hub(hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes]) -> None:
    hub.add("Tiny/Llama", folder_files | {"chat_template.jinja": b"x"})
    listed = "".join(f'[[model.file]]\nname = "{name}"\n' for name in folder_files)
    catalog = parse_catalog(
        f'[[model]]\nname = "tiny:1m"\naliases = ["tiny:latest"]\ndescription = ""\nlicence = "MIT"\n{listed}'
        '[[model.source]]\nkind = "hub"\nrepo = "Tiny/Gone"\n[[model.source]]\nkind = "hub"\nrepo = "Tiny/Llama"\n'
    )
    store = make_store(hub, catalog=catalog)
    pull(store, "tiny")
    record = store.get("Tiny:1M")
    assert record.name == "tiny:1m" and {file.name for file in record.files} == set(folder_files)


def test_catalog_pins_are_held_against_the_hub(hub: FakeHub, make_store: MakeStore, gguf: bytes) -> None:
    hub.add("Tiny/G", {"m.gguf": gguf})
    text = '[[model]]\nname = "tiny:q"\ndescription = ""\nlicence = ""\n[[model.file]]\nname = "m.gguf"\nsize = {}\nsha256 = "{}"\n'
    source = '[[model.source]]\nkind = "hub"\nrepo = "Tiny/G"\n'
    wrong = make_store(hub, catalog=parse_catalog(text.format(len(gguf), "0" * 64) + source))
    assert refused(wrong, "tiny:q").code == "hash_mismatch" and hub.sent() == 0
    store = make_store(hub, catalog=parse_catalog(text.format(len(gguf), blob(gguf)) + source))
    pull(store, "tiny:q")
    assert store.get("tiny:q").files[0].sha256 == blob(gguf)
