"""The packed file as a worker uses it: mapped, checked, and made anew when it is not of this model, this layout or not whole.

Owned here: opening, and the rule for when a file may be used. Not here: making one (packing.py) and the layout (packed_layout.py).
A model of the store has its packed file in its own folder of the store, also where its weights lie elsewhere (an import in place):
the daemon says the path. Who has no path (a benchmark of a bare file) packs into a file without a name, gone with the process.
Invariant: a file that is open passed the native check and came from weights with the digest asked for. No torch, no numpy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.errors import CavectlError, CorruptFile
from engine.kernels.cpu.buffer import HeldBuffer
from engine.kernels.cpu.lib import load
from engine.models.spec import ModelSpec, ParameterInfo
from engine.weights.packed_layout import HEADER, MAGIC, RECORD, VERSION, PackedMeta, PackedTensor, table_checksum, unpack_records
from engine.weights.packing import ERROR_BYTES, pack, pack_into
from engine.weights.source import Progress, WeightSource
from engine.weights.tensor_set import HEAD, wanted_parameters

MAX_META_BYTES = 64 << 20


class Stale(CavectlError):
    """A sound packed file of other weights or another layout."""

    code = "store_error"


class PackedFile:
    """An open packed file. `data` is its mapping, read-only and shared by all processes that have it; `notes` are for a person."""

    def __init__(self, fd: int, name: str, digest: str | None) -> None:
        """Maps the open file; a `digest` of None is anybody's. Raises Stale or CorruptFile. The descriptor stays the caller's."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < HEADER.size:
            raise CorruptFile(f"{name} is no packed file")
        self.data = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
        try:
            self.meta, self.tensors = _read(self.data, name, digest)
            self.notes = list(self.meta.notes)
        except BaseException:
            self.data.close()
            raise

    @classmethod
    def open(cls, path: str | Path, digest: str) -> PackedFile:
        """Raises FileNotFoundError (OSError), Stale when it came from other weights or has another layout, CorruptFile."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return cls(fd, os.path.basename(path), digest)
        finally:
            os.close(fd)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    def close(self) -> None:
        """Idempotent. Must come after the executor is closed that uses it."""
        self.data.close()


def open_or_pack(
    source: WeightSource,
    spec: ModelSpec,
    parameters: Mapping[str, ParameterInfo],
    *,
    path: str = "",
    digest: str = "",
    source_name: str = "",
    progress: Progress,
) -> PackedFile:
    """The packed file of this checkpoint, made first where there is none that may be used.

    Raises as the loader does for a checkpoint that does not fit its spec. Where no file can be kept at `path`, one without a name
    is used, and a note says why.
    """
    wanted = wanted_parameters(source.tensors, parameters)
    if not path or not digest:
        return _pack_nameless(source, spec, parameters, progress)
    found = open_fresh(path, digest, wanted)
    if found is None:
        try:
            pack(source, spec, parameters, Path(path), source_digest=digest, source_name=source_name, progress=progress)
        except CavectlError as error:
            if error.code not in ("no_space", "store_error"):
                raise
            found = _pack_nameless(source, spec, parameters, progress)
            found.notes.append(f"{error.message}: they are packed at each load")
            return found
        found = PackedFile.open(path, digest)
    return found


def open_fresh(path: str | Path, digest: str, wanted: Mapping[str, ParameterInfo]) -> PackedFile | None:
    """The file at `path`, when it may be used for these parameters."""
    try:
        packed = PackedFile.open(path, digest)
    except (OSError, CorruptFile, Stale):
        return None
    if _fits(packed.tensors, wanted):
        return packed
    packed.close()
    return None


def _pack_nameless(
    source: WeightSource, spec: ModelSpec, parameters: Mapping[str, ParameterInfo], progress: Progress
) -> PackedFile:
    with tempfile.TemporaryFile(prefix="cavectl-packed-") as file:
        pack_into(file.fileno(), source, spec, parameters, digest="", progress=progress)
        return PackedFile(file.fileno(), "the packed weights", None)


def _fits(tensors: Mapping[str, PackedTensor], wanted: Mapping[str, ParameterInfo]) -> bool:
    """Whether these are the parameters and their shapes; a head may be missing, it is the embedding then."""
    if tensors.keys() != wanted.keys() and tensors.keys() != wanted.keys() - {HEAD}:
        return False
    shapes = ((tensors[name], wanted[name].shape) for name in tensors)
    return all((tensor.rows, tensor.columns) == ((1, *shape) if len(shape) == 1 else shape) for tensor, shape in shapes)


def _read(data: mmap.mmap, name: str, digest: str | None) -> tuple[PackedMeta, dict[str, PackedTensor]]:
    magic, version, count, _, meta_offset, meta_bytes, _ = HEADER.unpack(data[: HEADER.size])
    if magic == MAGIC and version != VERSION:
        raise Stale(f"{name} has version {version} of the layout, this is {VERSION}")
    _check(data, name)
    if meta_bytes > MAX_META_BYTES:
        raise CorruptFile(f"{name} has a description of {meta_bytes} bytes")
    try:
        meta = msgspec.json.decode(data[meta_offset : meta_offset + meta_bytes], type=PackedMeta)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"{name} has a description that cannot be read") from error
    table = data[: HEADER.size + count * RECORD.size]
    if meta.table != table_checksum(table) or len(set(meta.names)) != count or len(meta.names) != count:
        raise CorruptFile(f"{name} does not hold together")
    if digest is not None and meta.digest != digest:
        raise Stale(f"{name} was made from other weights")
    return meta, dict(zip(meta.names, unpack_records(table[HEADER.size :]), strict=True))


def _check(data: mmap.mmap, name: str) -> None:
    """The native check: after it, every record's bytes lie in the file."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    with HeldBuffer(data) as held:
        code = load().functions.cavectl_check_packed(held.address, held.bytes, error)
    if code:
        raise CorruptFile(f"{name}: {error.value.decode()}")
