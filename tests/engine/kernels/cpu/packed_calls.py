"""cavectl_pack and cavectl_unpack over tensors, and the layout read byte by byte: what formats.h says, written down again."""

from __future__ import annotations

import ctypes
import struct

import torch

from engine.kernels.cpu.lib import load
from engine.quant.gguf_types import TYPE_BY_NAME
from engine.weights.packed_layout import Kind, kind_of, tensor_bytes

BITS = {Kind.Q4_S: 4, Kind.Q4_M: 4, Kind.Q4_M16: 4, Kind.Q8_S: 8, Kind.Q8_M: 8, Kind.Q8_S16: 8}
OFFSET = {Kind.Q4_S: 8, Kind.Q8_S: 128, Kind.Q8_S16: 128}
SCALES = {Kind.Q4_M16: 2, Kind.Q8_S16: 2}
WITH_MINIMUMS = {Kind.Q4_M, Kind.Q4_M16, Kind.Q8_M}
ITEM_CODES = {Kind.F32: "<f", Kind.F16: "<e"}


class Refused(Exception):
    pass


def pack_raw(
    dtype: str, source: bytes, rows: int, columns: int, kind: int, target_bytes: int, heads: int = 0
) -> tuple[bytearray, int]:
    """One call as it is given; the packed bytes and the exponent. Refused with the library's line."""
    target, exponent, error = bytearray(target_bytes), ctypes.c_int32(99), ctypes.create_string_buffer(512)
    into = (ctypes.c_char * len(target)).from_buffer(target)
    code = load().functions.cavectl_pack(
        dtype.encode(), source, len(source), rows, columns, heads, kind, into, target_bytes, ctypes.byref(exponent), error
    )
    if code:
        assert code == -1 and error.value
        raise Refused(error.value.decode())
    return target, exponent.value


def pack_tensor(
    dtype: str, source: bytes, rows: int, columns: int, *, kind: Kind | None = None, heads: int = 0
) -> tuple[Kind, bytearray, int]:
    kind = kind_of(dtype) if kind is None else kind
    return kind, *pack_raw(dtype, source, rows, columns, kind, tensor_bytes(kind, rows, columns), heads)


def unpack_raw(kind: int, exponent: int, packed: bytes, rows: int, columns: int, first: int, count: int) -> torch.Tensor:
    out, error = torch.full((count if count <= rows else 1, columns), 7.0), ctypes.create_string_buffer(512)
    held = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
    code = load().functions.cavectl_unpack(
        kind, exponent, held, len(packed), rows, columns, first, count, ctypes.c_void_p(out.data_ptr()), error
    )
    if code:
        assert code == -1 and error.value
        raise Refused(error.value.decode())
    return out


def unpack_tensor(kind: Kind, packed: bytes, exponent: int, rows: int, columns: int) -> torch.Tensor:
    return unpack_raw(kind, exponent, packed, rows, columns, 0, rows)


def read_weight(kind: Kind, packed: bytes, exponent: int, columns: int, row: int, column: int) -> float:
    """One weight, found in the bytes by what the layout says; float32 arithmetic in the order given there."""
    if kind is Kind.VECTOR_F32:
        return struct.unpack_from("<f", packed, 4 * column)[0]
    lane, panel = row % 16, row // 16
    if kind is Kind.BF16:
        at = (panel * columns + column) * 32 + 2 * lane
        return struct.unpack("<f", b"\0\0" + packed[at : at + 2])[0]
    if kind in ITEM_CODES:
        size = struct.calcsize(ITEM_CODES[kind])
        return struct.unpack_from(ITEM_CODES[kind], packed, ((panel * columns + column) * 16 + lane) * size)[0]
    scales, minimums = SCALES.get(kind, 1), kind in WITH_MINIMUMS
    numbers = 16 * 32 * BITS[kind] // 8
    block = numbers + 16 * 2 * scales * (2 if minimums else 1)
    at = (panel * (columns // 32) + column // 32) * block
    c = column % 32
    if BITS[kind] == 4:
        pair = packed[at + 64 * (c // 8) + 4 * lane + c % 4]
        stored = pair & 15 if c % 8 < 4 else pair >> 4
    else:
        stored = packed[at + 64 * (c // 4) + 4 * lane + c % 4]
    part = c * scales // 32
    scale = struct.unpack_from("<e", packed, at + numbers + 2 * (16 * part + lane))[0]
    weight = torch.tensor(scale) * (stored - OFFSET.get(kind, 0))
    if minimums:
        weight += struct.unpack_from("<e", packed, at + numbers + 2 * (16 * (scales + part) + lane))[0]
    return float(weight * 2.0**-exponent)


def row_bytes(dtype: str, columns: int) -> int:
    kind = TYPE_BY_NAME[dtype]
    return columns // kind.block_elements * kind.block_bytes
