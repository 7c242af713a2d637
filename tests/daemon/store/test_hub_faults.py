"""A hub that sends wrong bytes, hostile descriptions, refusals. Rows S02, S04, S05, B25 and the hub's fault rows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.daemon.store.conftest import tree
from tests.daemon.store.pulling import FILE, NAME, MakeStore, pull, refused
from tests.fixtures.fake_hub import FakeHub, Fault

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


def test_the_token_of_the_login_is_used_where_the_settings_give_none(
    hub: FakeHub, make_store: MakeStore, gguf: bytes, hf_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    hub.add("Tiny/Gated", {"m.gguf": gguf}, needs_token=True)
    store = make_store(hub)
    assert refused(store, "hf.co/Tiny/Gated").code == "hub_unauthorized"
    hf_home.mkdir()
    (hf_home / "token").write_bytes(b"\xff")
    assert refused(store, "hf.co/Tiny/Gated").code == "hub_unauthorized"
    (hf_home / "token").write_text("hf_secret\n")  # a login while the daemon runs
    assert refused(make_store(hub, token=""), "hf.co/Tiny/Gated").code == "hub_unauthorized"
    pull(store, "hf.co/Tiny/Gated")
    store.remove("hf.co/Tiny/Gated")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert refused(store, "hf.co/Tiny/Gated").code == "hub_unauthorized"


def test_a_login_that_fails_is_said(hub: FakeHub, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("secret")

    monkeypatch.setattr("huggingface_hub.get_token", fail)
    error = refused(make_store(hub))
    assert error.code == "hub_unauthorized" and "secret" not in error.message and "log in again" in error.hint
