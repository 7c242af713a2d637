"""What the store writes beside a model's files, and the data the rest of the daemon gets of it.

`manifest.json` is the one record of a model: there is no index, so a lost or broken one costs its own model alone, and its files
are never deleted for it. Owns the formats; not the disk (store.py) nor the paths (paths.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from daemon.store.names import ModelName, parse_model_name
from daemon.store.paths import PACKED, below, check_file_name, check_file_names
from engine.errors import CavectlError, CorruptFile
from engine.types import ModelInfo

FORMAT = 1
MAX_MANIFEST_BYTES = 8 << 20
MAX_INFO_BYTES = 512 << 20
_WEIGHTS = (".gguf", ".safetensors")
Mode = Literal["stored", "linked", "copied", "in-place"]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file of a model. `path` and `mtime_ns` are set when the bytes stay where the user has them."""

    name: str
    size: int
    sha256: str
    path: str = ""
    mtime_ns: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights` is the file to open below the folder, or "" for the folder itself; absolute when the files are in place."""

    format: int
    name: str
    source: str
    revision: str
    licence: str
    created: float
    mode: Mode
    weights: str
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that may be loaded. `info.vocabulary` is there from `Store.get` alone: it is large."""

    name: str
    digest: str
    root: Path
    weights: Path
    files: tuple[FileRecord, ...]
    source: str
    revision: str
    licence: str
    modified_at: float
    info: ModelInfo
    damaged: tuple[str, ...] = ()

    @property
    def packed(self) -> Path:
        """Where its packed weights are, or belong: in the store, also where the weights lie elsewhere."""
        return below(self.root, PACKED)

    @property
    def weights_digest(self) -> str:
        return weights_digest(self.files)


class PullEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a pull, an import or a verification, in the terms of the wire."""

    status: str
    file: str = ""
    total: int = 0
    completed: int = 0
    digest: str = ""


def weights_digest(files: Iterable[FileRecord]) -> str:
    """One digest of all weight files' bytes: what packed weights are made from, and stale without."""
    weights = sorted((file for file in files if file.name.lower().endswith(_WEIGHTS)), key=lambda file: file.name)
    if len(weights) == 1:
        return f"sha256:{weights[0].sha256}"
    lines = "".join(f"{file.sha256}  {file.name}\n" for file in weights)
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes) -> tuple[Manifest, ModelName]:
    """The manifest and its model's name, everything in it checked. CorruptFile otherwise."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        name = parse_model_name(manifest.name)
        check_file_names(file.name for file in manifest.files)
        if manifest.weights and manifest.mode != "in-place":
            check_file_name(manifest.weights)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CavectlError) as error:
        raise CorruptFile(f"the manifest cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CorruptFile(f"the manifest has format {manifest.format}, this version reads {FORMAT}")
    return manifest, name


def manifest_digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def decode_info(data: bytes, *, vocabulary: bool) -> ModelInfo:
    """A vocabulary can be 100,000 strings, so a listing does not build it. CorruptFile when the bytes are no ModelInfo."""
    try:
        if vocabulary:
            return msgspec.msgpack.decode(data, type=ModelInfo)
        fields = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
        fields.pop("vocabulary", None)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ModelInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"the model facts cannot be read: {error}") from error
