"""Imports: modes, links (B29), Unicode paths and a C locale (B28), incomplete folders (B30), no code runs (S11)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.store import PullEvent, Store
from daemon.store.inspector import ChildInspector
from engine.errors import CavectlError
from tests.daemon.store.conftest import leftovers, tree, write_files
from tests.daemon.store.pulling import cache_repo

MakeStore = Callable[..., Store]


def take(store: Store, path: Path, name: str | None = None, mode: str = "auto") -> list[PullEvent]:
    events: list[PullEvent] = []
    asyncio.run(store.import_path(path, name, mode, events.append))  # type: ignore[arg-type]
    return events


def refused(store: Store, path: Path, **options: str) -> CavectlError:
    with pytest.raises(CavectlError) as caught:
        take(store, path, **options)
    assert store.list() == [] and "\n" not in caught.value.message
    assert not path.is_absolute() or str(path.parent) not in caught.value.message + caught.value.hint  # S29
    return caught.value


@pytest.fixture
def gguf_file(tmp_path: Path, gguf: bytes) -> Path:
    path = tmp_path / "my model.gguf"
    path.write_bytes(gguf)
    return path


@pytest.mark.parametrize(
    ("mode", "recorded"), [("auto", "in-place"), ("in-place", "in-place"), ("link", "linked"), ("copy", "copied")]
)
def test_gguf(make_store: MakeStore, gguf_file: Path, gguf: bytes, mode: str, recorded: str) -> None:
    store = make_store()
    events = take(store, gguf_file, "mine:1", mode)
    record = store.get("Mine:1")
    assert record.weights.read_bytes() == gguf and record.source == str(gguf_file)
    same_inode = os.path.samefile(record.weights, gguf_file)
    assert same_inode == (recorded != "copied") and (record.weights == gguf_file) == (recorded == "in-place")
    assert json.loads((record.root / "manifest.json").read_text())["mode"] == recorded
    assert events[-1].status == "success" and events[-3].completed == events[-3].total == len(gguf)
    store.remove("mine:1")
    assert gguf_file.read_bytes() == gguf and leftovers(store.root) == []


def test_name_from_the_file_and_get_by_path(make_store: MakeStore, gguf_file: Path) -> None:
    store = make_store()
    take(store, gguf_file)
    assert store.get("my-model").name == store.get(str(gguf_file)).name == "my-model:latest"
    with pytest.raises(CavectlError, match="not imported"):
        store.get("/somewhere/else.gguf")


def test_in_place_file_that_goes_or_changes(make_store: MakeStore, gguf_file: Path) -> None:
    store = make_store()
    take(store, gguf_file, "mine")
    os.utime(gguf_file, ns=(1, 1))
    with pytest.raises(CavectlError, match="changed"):
        store.get("mine")
    asyncio.run(store.verify("mine"))  # only the time did
    assert store.get("mine").weights == gguf_file
    gguf_file.unlink()
    with pytest.raises(CavectlError, match="gone") as caught:
        store.get("mine")
    assert caught.value.code == "store_error" and "import it again" in caught.value.hint
    assert caught.value.message.startswith("my model.gguf of mine:latest is gone")  # S29: no path
    assert [record.name for record in store.list()] == ["mine:latest"]


def test_same_import_again_and_another_under_the_same_name(make_store: MakeStore, gguf_file: Path, other_gguf: bytes) -> None:
    store = make_store()
    take(store, gguf_file, "mine")
    digest = store.get("mine").digest
    take(store, gguf_file, "mine")
    assert store.get("mine").digest == digest
    gguf_file.write_bytes(other_gguf)
    with pytest.raises(CavectlError) as caught:
        take(store, gguf_file, "mine")
    assert caught.value.code == "model_exists"


@pytest.mark.parametrize(("mode", "in_store"), [("auto", True), ("link", True), ("copy", True), ("in-place", False)])
def test_folder(make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes], mode: str, in_store: bool) -> None:
    extra = {"notes.txt": b"x", "pytorch_model.bin": b"\x80", "modeling_x.py": b"raise SystemExit"}
    folder = write_files(tmp_path / "llama", sharded_files | extra)
    store = make_store()
    take(store, folder, "mine", mode)
    record = store.get("mine")
    assert {file.name for file in record.files} == set(sharded_files)
    assert record.weights == (record.root if in_store else folder)
    asyncio.run(store.verify("mine"))
    store.remove("mine")
    assert tree(folder) == {**sharded_files, **extra}


def test_folder_with_one_gguf(make_store: MakeStore, gguf_file: Path) -> None:
    store = make_store()
    take(store, gguf_file.parent, "mine", "copy")
    assert store.get("mine").weights.name == "my model.gguf"


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("m.gguf", b"GGML....", "corrupt_file"),
        ("m.gguf", b"GGUF\x03", "corrupt_file"),
        ("m.bin", b"x", "unsupported_model"),
        ("m.safetensors", b"x", "unsupported_model"),
        ("m-00001-of-00002.gguf", b"GGUF", "unsupported_model"),
        ("m.gguf", b"", "corrupt_file"),
    ],
)
def test_files_that_are_no_model(make_store: MakeStore, tmp_path: Path, name: str, data: bytes, code: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert refused(make_store(), path, mode="copy").code == code


def test_paths_that_are_no_model(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    assert refused(store, tmp_path / "gone.gguf").code == "model_not_found"
    os.mkfifo(tmp_path / "pipe.gguf")
    assert refused(store, tmp_path / "pipe.gguf").code == "invalid_request"
    (tmp_path / "empty").mkdir()
    assert refused(store, tmp_path / "empty").code == "unsupported_model"
    assert "absolute path" in refused(store, Path("../relative.gguf")).hint
    assert refused(store, Path("relative.gguf")).code == "invalid_request"
    assert refused(store, Path("./relative.gguf")).code == "invalid_request"
    (tmp_path / "dir.gguf").mkdir()
    assert refused(store, tmp_path / "dir.gguf").code == "unsupported_model"


def test_names_of_the_catalog_and_the_hub_are_not_for_imports(gguf_file: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert refused(store, gguf_file, name="smollm2:135m").code == "invalid_request"
    assert refused(store, gguf_file, name="hf.co/a/b").code == "invalid_request"


# --- links (B29)


@pytest.fixture
def snapshot(tmp_path: Path, folder_files: dict[str, bytes]) -> Path:
    return cache_repo(tmp_path / "hub", "Tiny/Llama", folder_files, {"model.safetensors"}, "0" * 40)


@pytest.mark.parametrize("mode", ["auto", "link", "copy", "in-place"])
def test_snapshot_of_good_links(make_store: MakeStore, snapshot: Path, folder_files: dict[str, bytes], mode: str) -> None:
    store = make_store()
    take(store, snapshot, "mine", mode)
    record = store.get("mine")
    assert {file.name for file in record.files} == set(folder_files)
    for name, data in folder_files.items():
        assert record.weights.joinpath(name).read_bytes() == data
        assert mode == "in-place" or not record.root.joinpath(name).is_symlink()
    store.remove("mine")
    assert snapshot.joinpath("model.safetensors").read_bytes() == folder_files["model.safetensors"]


@pytest.mark.parametrize("name", ["tokenizer.json", "extra.txt"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../../blobs/gone", "leads nowhere"),
        ("{name}", "circle"),
        ("/etc/hostname", "leads out"),
        ("../../blobs", "directory"),
        ("../../..", "leads out"),
    ],
)
def test_bad_links(make_store: MakeStore, snapshot: Path, name: str, target: str, message: str) -> None:
    link = snapshot / name
    link.unlink(missing_ok=True)
    link.symlink_to(target.format(name=name))
    opened: list[str] = []

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and watching:
            opened.append(str(args[0]))

    watching = True
    sys.addaudithook(watch)
    error = refused(make_store(), snapshot)
    watching = False
    assert message in error.message and name in error.message
    assert not any(path.startswith("/etc/hostname") for path in opened)


def test_folder_link_out_of_a_plain_folder(make_store: MakeStore, tmp_path: Path, folder_files: dict[str, bytes]) -> None:
    folder = write_files(tmp_path / "llama", folder_files)
    (tmp_path / "secret").write_bytes(b"{}")
    (folder / "vocab.json").symlink_to(tmp_path / "secret")
    assert "leads out" in refused(make_store(), folder).message


# --- incomplete folders (B30)


def test_missing_shards_are_all_named(make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes]) -> None:
    gone = {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}
    folder = write_files(tmp_path / "m", {name: data for name, data in sharded_files.items() if name not in gone})
    error = refused(make_store(), folder)
    assert error.code == "corrupt_file" and all(name in error.message for name in gone)


def test_shard_named_by_the_index_only(make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes]) -> None:
    index = json.loads(sharded_files["model.safetensors.index.json"])
    index["weight_map"]["extra.weight"] = "extra.safetensors"
    folder = write_files(tmp_path / "m", sharded_files | {"model.safetensors.index.json": json.dumps(index).encode()})
    error = refused(make_store(), folder)
    assert error.code == "corrupt_file" and "extra.safetensors" in error.message


def test_cut_shard(make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes]) -> None:
    name = "model-00002-of-00003.safetensors"
    folder = write_files(tmp_path / "m", sharded_files | {name: sharded_files[name][:-4096]})
    error = refused(make_store(), folder)
    assert error.code == "corrupt_file" and name in error.message


def test_hostile_index(make_store: MakeStore, tmp_path: Path, sharded_files: dict[str, bytes]) -> None:
    index = json.dumps({"weight_map": {"a": "../../../etc/passwd"}}).encode()
    folder = write_files(tmp_path / "m", sharded_files | {"model.safetensors.index.json": index})
    assert refused(make_store(), folder).code == "invalid_name"


# --- Unicode (B28)

HARD = "Ж é 模型 /m 1.gguf"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_everywhere(make_store: MakeStore, tmp_path: Path, gguf: bytes, form: str) -> None:
    path = tmp_path / unicodedata.normalize(form, HARD)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True)
    path.write_bytes(gguf)
    store = make_store(root=path.parent / "store")
    for mode in ("in-place", "link", "copy"):
        take(store, path, f"модель-é:{mode}", mode)
        assert store.get(unicodedata.normalize("NFD", f"МОДЕЛЬ-é:{mode}")).weights.read_bytes() == gguf


def test_c_locale(tmp_path: Path, gguf: bytes) -> None:
    """A process under LANG=C, with the real child that reads the file."""
    path = tmp_path / HARD
    path.parent.mkdir()
    path.write_bytes(gguf)
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom daemon.store import Store\n"
        "store = Store(Path(sys.argv[1]).parent / 'store')\n"
        "asyncio.run(store.import_path(sys.argv[1], 'm', 'copy'))\nprint(ascii(str(store.get('m').weights)))\n"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "PYTHON"))} | {
        "LANG": "C",
        "LC_ALL": "C",
    }
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "m 1.gguf" in done.stdout


def test_path_that_is_no_unicode(make_store: MakeStore, tmp_path: Path, gguf: bytes) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.gguf"
    with open(path, "wb") as file:
        file.write(gguf)
    assert refused(make_store(), Path(os.fsdecode(path))).code in ("invalid_name", "invalid_request")


# --- nothing of a model runs (S11), and the child that reads it is held


def test_no_code_of_a_folder_runs(make_store: MakeStore, tmp_path: Path, folder_files: dict[str, bytes]) -> None:
    canary = tmp_path / "canary"
    evil = f"open({str(canary)!r}, 'w')".encode()
    config = json.loads(folder_files["config.json"]) | {"auto_map": {"AutoModel": "modeling_evil.M"}, "trust_remote_code": True}
    files = dict.fromkeys(("modeling_evil.py", "tokenization_evil.py", "handler.py", "__init__.py", "sitecustomize.py"), evil)
    folder = write_files(tmp_path / "evil", folder_files | files | {"config.json": json.dumps(config).encode()})
    store = make_store(inspector=ChildInspector())
    try:
        take(store, folder, "evil")
        asyncio.run(store.verify("evil"))
    except CavectlError as error:
        assert error.code == "unsupported_model"  # refusing such a config is as good
    assert not canary.exists()


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("import time; time.sleep(60)", "corrupt_file", "within 0.5 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "corrupt_file", "signal 11"),
        ("print('not msgpack')", "corrupt_file", "cannot be read"),
        ("import sys; sys.exit(3)", "corrupt_file", "exit code 3"),
    ],
)
def test_child_that_misbehaves(make_store: MakeStore, gguf_file: Path, program: str, code: str, message: str) -> None:
    store = make_store(inspector=ChildInspector(timeout_s=0.5, command=(sys.executable, "-S", "-c", program)))
    error = refused(store, gguf_file)
    assert error.code == code and message in error.message
    assert leftovers(store.root) == []


def test_child_that_cannot_start(make_store: MakeStore, gguf_file: Path) -> None:
    error = refused(make_store(inspector=ChildInspector(command=("/nowhere/python",))), gguf_file)
    assert error.code == "no_process" and "/nowhere" not in error.message


def test_real_child(make_store: MakeStore, gguf_file: Path, real_model_path: Path) -> None:
    store = make_store(inspector=ChildInspector())
    take(store, gguf_file, "tiny")
    take(store, real_model_path, "real")
    assert store.get("real").info.quantization == "Q4_1" and store.get("tiny").info.architecture == "llama"
