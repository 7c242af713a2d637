"""Every path inside the store is built here, and only here.

`StorePaths.inside` is the one function: each part is checked, and the path, links resolved, must lie in the store or it raises.
Also the rules for names that come from outside (a hub's file list, an index's weight map) and the one check of a digest. Not
here: opening anything (files.py). Layout: models/<owner>/<name>/<tag>@<revision>/, partial/<key>[~<owner>]/, staging/, kept/.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from engine.errors import CavectlError

if TYPE_CHECKING:
    from daemon.store.names import ModelName

MANIFEST = "manifest.json"
INFO = "info.msgpack"
DAMAGED = "damaged.json"
PACKED = "weights.packed"  # made from the weights, beside them; while it is being written its name is hidden and longer
RESERVED = frozenset({MANIFEST, INFO, DAMAGED, PACKED})
NO_OWNER = "_"
MAX_PART_BYTES = 255
MAX_PARTS = 16
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DRIVE = re.compile(r"[A-Za-z]:")


class UnsafePath(CavectlError):
    code = "invalid_name"


def digest_hex(digest: str) -> str:
    """The 64 hex digits of `sha256:<hex>`; anything else raises before a path can be made of it."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise UnsafePath(f"{_quoted(digest)} is not a sha256 digest")
    return digest.removeprefix("sha256:")


def check_part(part: str) -> str:
    """One component of a path, on POSIX and on Windows."""
    bad = part in ("", ".", "..") or "/" in part or "\\" in part or _DRIVE.match(part)
    if bad or not part.isprintable() or len(part.encode("utf-8", "surrogatepass")) > MAX_PART_BYTES:
        raise UnsafePath(f"{_quoted(part)} cannot be part of a path in the store")
    return part


def check_file_name(name: str) -> tuple[str, ...]:
    """The parts of a relative file name from outside, e.g. `("gguf", "model-Q4_K_M.gguf")`."""
    parts = tuple(name.split("/"))
    if len(parts) > MAX_PARTS:
        raise UnsafePath(f"the file name {_quoted(name)} has more than {MAX_PARTS} parts")
    try:
        for part in parts:
            check_part(part)
    except UnsafePath:
        raise UnsafePath(f"the file name {_quoted(name)} is not a plain relative name") from None
    return parts


def check_file_names(names: Iterable[str]) -> None:
    """All names of one model: each plain, none reserved, no two the same on a file system that ignores case."""
    seen: dict[str, str] = {}
    for name in names:
        check_file_name(name)
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if folded in RESERVED:
            raise UnsafePath(f"the file name {_quoted(name)} is reserved by the store")
        if folded in seen:
            raise UnsafePath(f"the file names {_quoted(seen[folded])} and {_quoted(name)} differ only in case")
        seen[folded] = name


class StorePaths:
    """The layout below one root. Returns absolute paths; creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()

    def inside(self, *parts: str) -> Path:
        """The path of `parts` in the store. Raises UnsafePath when it would leave it, through a link too."""
        path = self.root.joinpath(*(check_part(part) for part in parts))
        try:
            inside = path.resolve().is_relative_to(self.root.resolve())
        except (OSError, RuntimeError):  # a loop of links
            inside = False
        if not inside:
            raise UnsafePath(f"{_quoted(parts[-1])} leads out of the store")
        return path

    def models(self) -> Path:
        return self.inside("models")

    def variants(self, name: ModelName) -> Path:
        """The folder that holds every tag and revision of `name`."""
        return self.inside("models", *self._name_parts(name))

    def model(self, name: ModelName, revision: str) -> Path:
        return self.inside("models", *self._name_parts(name), f"{_encoded(name.key[3])}@{_encoded(revision)}")

    def partials(self) -> Path:
        return self.inside("partial")

    def partial(self, digest: str, owner: str = "") -> Path:
        return self.inside("partial", digest_hex(digest) + (f"~{owner}" if owner else ""))

    def staging(self, owner: str = "") -> Path:
        return self.inside("staging", owner) if owner else self.inside("staging")

    def kept(self, token: str) -> Path:
        return self.inside("kept", token)

    def child(self, folder: Path, name: str) -> Path:
        """A file named `name` (checked, may have folders) below `folder` of the store."""
        return self.inside(*folder.relative_to(self.root).parts, *check_file_name(name))

    def parts(self, path: Path) -> tuple[str, ...]:
        """The components of a path of the store below its root, for opening one by one."""
        return path.relative_to(self.root).parts

    def _name_parts(self, name: ModelName) -> tuple[str, str]:
        _, owner, model, _ = name.key
        return (owner or NO_OWNER, model)


def below(folder: Path, name: str) -> Path:
    """A file of a model by its recorded name; checked again, for the record is a file too."""
    return folder.joinpath(*check_file_name(name))


def cached_blob(blobs: Path, value: str) -> Path:
    """A blob of the Hugging Face cache, named by a sha256 or a git blob id."""
    if not _BLOB.fullmatch(value):
        raise UnsafePath(f"{_quoted(value)} is not a hash")
    return blobs.joinpath(value)


def is_packed(name: str) -> bool:
    """Whether a file of a model's folder is its packed file, or one that was not finished."""
    return name == PACKED or name.startswith(f".{PACKED}.")


def tag_prefix(name: ModelName) -> str:
    return f"{_encoded(name.key[3])}@"


def _encoded(text: str) -> str:
    """Injective, and free of `/` and `@`; letters of any script stay readable."""
    return "".join(c if c.isalnum() or c in "._-+" else quote(c, safe="") for c in text)


def _quoted(text: object) -> str:
    shown = str(text)[:80]
    return '"' + "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in shown) + '"'
