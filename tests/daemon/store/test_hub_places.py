"""Files that are near already (the Hugging Face cache), and hub entries of the catalog."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from daemon.store.catalog import parse_catalog
from daemon.store.files import FileLayer
from tests.daemon.store.pulling import MakeStore, cache_repo, pull, refused, sha256
from tests.fixtures.fake_hub import FakeHub

# --- the Hugging Face cache


def test_cached_files_are_linked_not_fetched(
    hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("Tiny/Llama", folder_files)
    snapshot = cache_repo(tmp_path / "hf" / "hub", "Tiny/Llama", folder_files, {"model.safetensors"}, "0" * 40)
    store = make_store(hub)
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
    store = make_store(hub)
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
    store = make_store(hub, catalog=parse_catalog(text.format(len(gguf), sha256(gguf)) + source))
    pull(store, "tiny:q")
    assert store.get("tiny:q").files[0].sha256 == sha256(gguf)


def test_cache_on_another_file_system_is_copied(
    hub: FakeHub, make_store: MakeStore, folder_files: dict[str, bytes], tmp_path: Path
) -> None:
    class Apart(FileLayer):
        def link(self, source: str, target: str, source_fd: int | None, target_fd: int) -> None:
            if source_fd is None:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            super().link(source, target, source_fd, target_fd)

    hub.add("Tiny/Llama", folder_files)
    cache_repo(tmp_path / "hf" / "hub", "Tiny/Llama", folder_files, {"model.safetensors"}, "0" * 40)
    store = make_store(hub, layer=Apart())
    pull(store, "hf.co/Tiny/Llama")
    assert hub.sent() == 0
    for name, data in folder_files.items():
        path = store.get("hf.co/Tiny/Llama").root / name
        assert path.read_bytes() == data and path.stat().st_nlink == 1
