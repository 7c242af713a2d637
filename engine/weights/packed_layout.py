"""The packed file as numbers: kinds, sizes, records, and the JSON block that says what it came from.

Owned here: what engine/kernels/cpu/formats.h says, once more for Python, and the JSON block, which C++ never reads. Not here:
writing a file (packing.py), reading one (packed.py), the bytes of a tensor (pack.cpp). Invariant: tensors lie in order, each at the
first multiple of ALIGNMENT behind what is before it, and the file ends with the last. No torch, no numpy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec

MAGIC = b"CAVEPACK"
VERSION = 1  # of the layout; the meaning of a tensor's bytes included
PANEL_ROWS, BLOCK_COLUMNS, ALIGNMENT = 16, 32, 64
HEADER = struct.Struct("<8sIIQQQQ")
RECORD = struct.Struct("<IiQQQQQ")


class Kind(IntEnum):
    VECTOR_F32 = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    Q4_S = 4
    Q4_M = 5
    Q4_M16 = 6
    Q8_S = 7
    Q8_M = 8
    Q8_S16 = 9


_BLOCK_BYTES: Mapping[Kind, int] = {
    Kind.Q4_S: 288,
    Kind.Q4_M: 320,
    Kind.Q4_M16: 384,
    Kind.Q8_S: 544,
    Kind.Q8_M: 576,
    Kind.Q8_S16: 576,
}
_ITEM_BYTES: Mapping[Kind, int] = {Kind.F32: 4, Kind.F16: 2, Kind.BF16: 2}
_KIND_OF: Mapping[str, Kind] = {
    "F64": Kind.F32,
    "F32": Kind.F32,
    "F16": Kind.F16,
    "BF16": Kind.BF16,
    "Q4_0": Kind.Q4_S,
    "Q4_1": Kind.Q4_M,
    "Q4_K": Kind.Q4_M,
    "Q2_K": Kind.Q4_M16,
    "Q3_K": Kind.Q4_M16,
    "Q8_0": Kind.Q8_S,
    "Q5_0": Kind.Q8_S,
    "Q5_1": Kind.Q8_M,
    "Q5_K": Kind.Q8_M,
    "Q6_K": Kind.Q8_S16,
}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor in a packed file. `offset` counts from the start of the file; the weights are the stored ones times 2^-exponent."""

    index: int
    kind: Kind
    exponent: int
    rows: int
    columns: int
    offset: int
    bytes: int

    @property
    def record(self) -> bytes:
        return RECORD.pack(self.kind, self.exponent, self.rows, self.columns, self.offset, self.bytes, 0)


class PackedMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON block. `notes` is for a person; `table` is a checksum of header and records, 8 hex digits."""

    source: str  # name of the file or folder
    digest: str  # of the source's bytes
    names: list[str]  # our parameter names, in the order of the records
    types: list[str]  # what each tensor was in the source
    notes: list[str]
    table: str = "00000000"


def kind_of(gguf_type: str) -> Kind:
    """What a matrix of this type is packed as. KeyError for one that cannot be loaded."""
    return _KIND_OF[gguf_type]


def tensor_bytes(kind: Kind, rows: int, columns: int) -> int:
    if kind is Kind.VECTOR_F32:
        return 4 * columns
    panels = -(-rows // PANEL_ROWS)
    if kind in _ITEM_BYTES:
        return panels * PANEL_ROWS * columns * _ITEM_BYTES[kind]
    return panels * (columns // BLOCK_COLUMNS) * _BLOCK_BYTES[kind]


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def header_bytes(tensors: int, file_bytes: int, meta_bytes: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, tensors, file_bytes, HEADER.size + tensors * RECORD.size, meta_bytes, 0)


def table_checksum(table: bytes) -> str:
    return f"{zlib.crc32(table):08x}"


def unpack_records(records: bytes) -> Iterable[PackedTensor]:
    for index, (kind, exponent, rows, columns, offset, size, _) in enumerate(RECORD.iter_unpack(records)):
        yield PackedTensor(index, Kind(kind), exponent, rows, columns, offset, size)
