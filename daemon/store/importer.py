"""A model that is on this machine already: what a path holds, and which of its files to take.

Links are followed, for a Hugging Face cache is made of them, but only to regular files inside the folder or the cached
repository; a link that dangles, loops, leads out or names a directory is one clear error, and nothing behind it is opened. Not
here: the store's own files (registry.py).
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from daemon.store.files import read_regular
from daemon.store.names import show
from daemon.store.paths import check_file_names
from daemon.store.selection import INDEX, MAX_INDEX_BYTES, check_index, choose_files, weights_entry
from engine.errors import CavectlError, CorruptFile, InvalidRequest, UnsupportedModel

ImportMode = Literal["auto", "link", "copy", "in-place"]
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the model: its name there, and the real file after links."""

    name: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    """What an import takes. `weights` is the path to open when the files stay in place."""

    origin: Path
    files: tuple[FoundFile, ...]
    weights: Path
    is_folder: bool


def survey(path: Path) -> Found:
    """What `path` holds; reads names and links, the magic of a GGUF and a shard index, no weights."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{show(path.name)} is not valid Unicode", hint="rename it first") from None
    if path.is_dir():
        return _survey_folder(path)
    return _survey_file(path)


def _survey_file(path: Path) -> Found:
    real, found = _follow(path, None)
    if path.suffix.lower() != ".gguf":
        hint = "give the folder that holds config.json and the safetensors files" if path.suffix == ".safetensors" else ""
        raise UnsupportedModel(f"{show(path.name)} is not a .gguf file", hint=hint)
    if read_regular(real, len(_GGUF_MAGIC), cut=True) != _GGUF_MAGIC:
        raise CorruptFile(f"{show(path.name)} does not begin like a GGUF file")
    name = choose_files([path.name])[0]  # refuses a part of a split
    check_file_names([name])
    return Found(path, (FoundFile(name, real, found.st_size),), real, is_folder=False)


def _survey_folder(path: Path) -> Found:
    root = Path(os.path.realpath(path))
    present: dict[str, FoundFile] = {}
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                continue
            real, found = _follow(Path(entry.path), _link_root(root))
            if stat.S_ISREG(found.st_mode):
                present[entry.name] = FoundFile(entry.name, real, found.st_size)
    chosen = choose_files(list(present))
    check_file_names(chosen)
    if INDEX in chosen:
        check_index(read_regular(present[INDEX].path, MAX_INDEX_BYTES), chosen)
    gguf = weights_entry(chosen)
    weights = present[gguf].path if gguf else root
    return Found(path, tuple(present[name] for name in chosen), weights, is_folder=not gguf)


def _link_root(folder: Path) -> Path:
    """How far links may lead: the cached repository of a snapshot (models--owner--repo/snapshots/<commit>), else the folder."""
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository
    return folder


def _follow(path: Path, root: Path | None) -> tuple[Path, os.stat_result]:
    """The regular file that `path` is or links to; `root` None: any place, for the user named this very file."""
    try:
        real = Path(os.path.realpath(path, strict=True))
        if root is not None and not real.is_relative_to(root):
            raise InvalidRequest(
                f"the link {show(path.name)} leads out of the folder", hint="copy the file into the folder, or import its target"
            )
        found = os.stat(real, follow_symlinks=False)
    except FileNotFoundError:
        what = f"the link {show(path.name)} leads nowhere" if path.is_symlink() else f"there is no file {show(path.name)}"
        raise CavectlError(what, code="model_not_found") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidRequest(f"the link {show(path.name)} leads in a circle") from None
        raise CavectlError(f"cannot read {show(path.name)}: {error.strerror}", code="store_error") from error
    if path.is_symlink() and stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"the link {show(path.name)} is to a directory", hint="import the directory itself")
    if root is None and not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"{show(path.name)} is not a regular file")
    return real, found


def same_device(found: Found, store: Path) -> bool:
    """Whether hard links from the store to all files are possible."""
    device = os.stat(store).st_dev
    return all(os.stat(file.path).st_dev == device for file in found.files)
