"""Makes a packed file from a checkpoint.

Owned here: which tensors a packed file has, where they lie, when it becomes visible, and the rule for tied embeddings. Not here:
the bytes of a tensor (engine/kernels/cpu/pack.cpp) and reading the file (packed.py). Invariant: the file appears under its name in
one rename when all of it is on the disk; room for it is reserved before the first byte, so writing through the mapping cannot fail
half-way for want of space. No torch, no numpy.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import CavectlError, CorruptFile, UnsupportedModel
from engine.kernels.cpu.buffer import HeldBuffer
from engine.kernels.cpu.lib import load
from engine.models.spec import ModelSpec, ParameterInfo
from engine.platform import reserve_file
from engine.weights.packed_layout import (
    HEADER,
    RECORD,
    Kind,
    PackedMeta,
    PackedTensor,
    aligned,
    header_bytes,
    kind_of,
    table_checksum,
    tensor_bytes,
)
from engine.weights.source import Progress, TensorInfo, WeightSource
from engine.weights.tensor_set import EMBEDDING, HEAD, OTHER_HEAD, wanted_parameters

STAGE = "packing weights"
ERROR_BYTES = 512
_COMPARED_BYTES = 1 << 20
_ABANDONED_S = 3600  # after which a private file of another process is thought to be nobody's
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor to be: its parts in the checkpoint, and the one type that they are packed from."""

    name: str
    parts: tuple[str, ...]
    type: str
    place: PackedTensor


@dataclass(frozen=True, slots=True)
class _Plan:
    tensors: tuple[_Planned, ...]
    meta: bytes
    file_bytes: int


def pack(
    source: WeightSource,
    spec: ModelSpec,
    parameters: Mapping[str, ParameterInfo],
    target: Path,
    *,
    source_digest: str,
    source_name: str = "",
    keep_free_bytes: int = 0,
    progress: Progress,
) -> None:
    """Writes the packed file of a checkpoint. Raises CorruptFile or UnsupportedModel as the loader does, CavectlError (no_space,
    store_error) when it cannot be written: then nothing is left of it."""
    plan = _plan(source, spec, parameters, source_digest, source_name)
    private = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    _clear_abandoned(target)
    try:
        _check_space(target.parent, plan.file_bytes + keep_free_bytes)
        fd = os.open(private, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _fill(fd, plan, source, progress)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(private, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _write_error(error) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(private)


def pack_into(
    fd: int, source: WeightSource, spec: ModelSpec, parameters: Mapping[str, ParameterInfo], *, digest: str, progress: Progress
) -> None:
    """The same into an open, empty file that nobody else sees."""
    try:
        _fill(fd, _plan(source, spec, parameters, digest, ""), source, progress)
    except OSError as error:
        raise _write_error(error) from error


def numbers(data: memoryview, dtype: str, count: int) -> bytearray:
    """`count` stored numbers as float32, exactly as the loader would have them."""
    out = bytearray(4 * count)
    _call_pack("numbers", dtype, data, (1, count), 0, Kind.VECTOR_F32, memoryview(out))
    return out


# --- what goes where ----------------------------------------------------------------------------------------------------------


def _plan(source: WeightSource, spec: ModelSpec, parameters: Mapping[str, ParameterInfo], digest: str, source_name: str) -> _Plan:
    wanted = wanted_parameters(source.tensors, parameters)
    notes: list[str] = []
    if HEAD in wanted and spec.tied_embeddings:
        if _holds_again(source, wanted[HEAD].names[0], wanted[EMBEDDING].names[0]):
            del wanted[HEAD]
        else:
            notes.append(OTHER_HEAD)
    shapes = [_shaped(name, parameter, source.tensors) for name, parameter in wanted.items()]
    types = [planned.type for planned in shapes]
    meta = PackedMeta(source=source_name, digest=digest, names=list(wanted), types=types, notes=notes)
    meta_bytes = len(msgspec.json.encode(meta))
    placed, end = _placed(shapes, HEADER.size + len(shapes) * RECORD.size + meta_bytes)
    return _Plan(tuple(placed), msgspec.json.encode(meta), end)


def _shaped(name: str, parameter: ParameterInfo, stored: Mapping[str, TensorInfo]) -> _Planned:
    types = {stored[part].dtype for part in parameter.names}
    dtype = types.pop() if len(types) == 1 else "F32"
    if len(parameter.shape) not in (1, 2):
        raise UnsupportedModel(f"{name} has {len(parameter.shape)} dimensions, which cannot be packed")
    vector = len(parameter.shape) == 1
    rows, columns = (1, parameter.shape[0]) if vector else parameter.shape
    kind = Kind.VECTOR_F32 if vector else kind_of(dtype)
    return _Planned(name, parameter.names, dtype, PackedTensor(0, kind, 0, rows, columns, 0, tensor_bytes(kind, rows, columns)))


def _placed(shapes: Sequence[_Planned], start: int) -> tuple[list[_Planned], int]:
    placed, end = [], start
    for index, planned in enumerate(shapes):
        place = replace(planned.place, index=index, offset=aligned(end))
        placed.append(replace(planned, place=place))
        end = place.offset + place.bytes
    return placed, end


def _holds_again(source: WeightSource, head: str, embedding: str) -> bool:
    """Whether both tensors are the same numbers. They have the same shape."""
    (a, type_a), (b, type_b) = source.raw(head), source.raw(embedding)
    if type_a == type_b:
        return all(bytes(x) == bytes(y) for x, y in zip(_pieces(a, _COMPARED_BYTES), _pieces(b, _COMPARED_BYTES), strict=True))
    rows, columns = source.tensors[head].shape
    each = max(1, _COMPARED_BYTES // (4 * columns))
    pairs = zip(_pieces(a, each * len(a) // rows), _pieces(b, each * len(b) // rows), strict=True)
    counts = (min(each, rows - first) * columns for first in range(0, rows, each))
    return all(numbers(x, type_a, count) == numbers(y, type_b, count) for (x, y), count in zip(pairs, counts, strict=True))


def _pieces(data: memoryview, step: int) -> Iterator[memoryview]:
    return (data[at : at + step] for at in range(0, len(data), step))


# --- writing ------------------------------------------------------------------------------------------------------------------


def _fill(fd: int, plan: _Plan, source: WeightSource, progress: Progress) -> None:
    reserve_file(fd, plan.file_bytes)
    with mmap.mmap(fd, plan.file_bytes) as data:
        records = [planned.record for planned in _packed(plan, source, data, progress)]
        table = header_bytes(len(records), plan.file_bytes, len(plan.meta)) + b"".join(records)
        meta = msgspec.structs.replace(msgspec.json.decode(plan.meta, type=PackedMeta), table=table_checksum(table))
        start = table + msgspec.json.encode(meta)
        data[: len(start)] = start
    progress(STAGE, 1.0)


def _packed(plan: _Plan, source: WeightSource, data: mmap.mmap, progress: Progress) -> Iterator[PackedTensor]:
    for planned in plan.tensors:
        place = planned.place
        progress(STAGE, place.offset / plan.file_bytes)
        with memoryview(data) as whole, whole[place.offset : place.offset + place.bytes] as target:
            yield replace(place, exponent=_pack_tensor(source, planned, target))


def _pack_tensor(source: WeightSource, planned: _Planned, target: memoryview) -> int:
    place, parts = planned.place, [source.raw(part) for part in planned.parts]
    heads = [source.interleaved_heads(part) for part in planned.parts]
    if len(parts) == 1:
        return _call_pack(planned.name, planned.type, parts[0][0], (place.rows, place.columns), heads[0], place.kind, target)
    if any(heads):
        raise UnsupportedModel(f"{planned.name} is stacked from tensors with interleaved heads, which cannot be packed")
    counts = [math.prod(source.tensors[part].shape) for part in planned.parts]
    same = all(dtype == planned.type for _, dtype in parts)
    stacked = b"".join(data if same else numbers(data, dtype, count) for (data, dtype), count in zip(parts, counts, strict=True))
    return _call_pack(planned.name, planned.type, memoryview(stacked), (place.rows, place.columns), 0, place.kind, target)


def _call_pack(name: str, dtype: str, data: memoryview, shape: tuple[int, int], heads: int, kind: Kind, target: memoryview) -> int:
    """One tensor by native code; gives its exponent."""
    exponent, error = ctypes.c_int32(), ctypes.create_string_buffer(ERROR_BYTES)
    library: Any = load().functions
    with HeldBuffer(data) as source, HeldBuffer(target) as into:
        code = library.cavectl_pack(
            dtype.encode(), source.address, source.bytes, *shape, heads, kind, into.address, into.bytes, exponent, error
        )
    if code:
        raise CorruptFile(f"{name} cannot be packed: {error.value.decode()}")
    return exponent.value


def _check_space(folder: Path, need_bytes: int) -> None:
    usage = os.statvfs(folder)
    if usage.f_bavail * usage.f_frsize < need_bytes:
        raise OSError(errno.ENOSPC, "no space left")


def _clear_abandoned(target: Path) -> None:
    """Takes away private files that a killed process left."""
    for other in target.parent.glob(f".{target.name}.*"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > _ABANDONED_S:
                other.unlink()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_error(error: OSError) -> CavectlError:
    if error.errno in _FULL:
        return CavectlError("there is no space on the disk for the packed weights", code="no_space", hint="free some space")
    return CavectlError(f"the packed weights cannot be written: {error.strerror}", code="store_error")
