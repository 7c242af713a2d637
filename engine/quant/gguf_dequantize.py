"""Turns blocks of GGUF types into float32 numbers, in torch.

Owned here: the arithmetic of each block type. Not here: their sizes (gguf_types.py) and where the bytes come from (engine/weights).
Invariant: each number is computed in float32 in the order the type's definition gives, so results are equal to the bit on every
machine; any bit pattern gives some number. Source: the block structs of ggml and their reference loops.

A block function takes uint8 (N, block bytes) and returns float32 (N, block elements). Within a K block of 256: 16 or 8 sub-blocks
have a scale each, and bits of 128 consecutive weights are packed in planes of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.quant.gguf_types import GgufType

_CHUNK_ELEMENTS = 1 << 20  # what is unpacked at a time: temporaries stay near the caches, and small beside the result
_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(data: Tensor, kind: GgufType) -> Tensor:
    """data: contiguous uint8, whole blocks. Returns float32 (elements,), or a view in the stored dtype for F32, F16 and BF16.

    Raises KeyError for a type outside LOADABLE_TYPES: who opens a file has refused it.
    """
    if kind.name in _PLAIN:
        return _plain(data.view(-1), _PLAIN[kind.name])
    unpack, blocks = _UNPACK[kind.name], data.view(-1, kind.block_bytes)
    out = torch.empty(len(blocks), kind.block_elements)
    step = _CHUNK_ELEMENTS // kind.block_elements
    for start in range(0, len(blocks), step):
        out[start : start + step] = unpack(blocks[start : start + step])
    return out.view(-1)


def _plain(data: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = data.data_ptr() % dtype.itemsize == 0  # a file may ask for an alignment of 1
    return (data if aligned else data.clone()).view(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 (N, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _planes(packed: Tensor, bits: int) -> Tensor:
    """uint8 (..., n) -> (..., 8 / bits, n): the values of `bits` bits, low ones first. Callers mask what they need."""
    return torch.stack([packed >> shift for shift in range(0, 8, bits)], -2) & ((1 << bits) - 1)


def _q4(blocks: Tensor, at: int) -> Tensor:
    return _planes(blocks[:, at : at + 16], 4).flatten(1)


def _q5(blocks: Tensor, at: int) -> Tensor:
    """32 fifth bits, then 32 nibbles."""
    high = (blocks[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _q4(blocks, at + 4) | high.flatten(1) << 4


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_q4(blocks, 2).float() - 8)


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _q4(blocks, 4).float() + _half(blocks, 2)


def _unpack_q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_q5(blocks, 2).float() - 16)


def _unpack_q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _q5(blocks, 4).float() + _half(blocks, 2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _unpack_q2_k(blocks: Tensor) -> Tensor:
    """16 x (4-bit scale, 4-bit minimum), 256 x 2 bits, d, dmin."""
    packed = blocks[:, :16]
    scales, minima = _half(blocks, 80) * (packed & 15).float(), _half(blocks, 82) * (packed >> 4).float()
    q = _planes(blocks[:, 16:80].view(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return (scales[..., None] * q - minima[..., None]).flatten(1)


def _unpack_q3_k(blocks: Tensor) -> Tensor:
    """256 high bits, 256 x 2 bits, 16 x 6-bit scales, d. A high bit that is not set takes 4 away."""
    scales = _half(blocks, 108) * (_q3_k_scales(blocks[:, 96:108]).float() - 32)
    low = _planes(blocks[:, 32:96].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    high = _planes(blocks[:, :32], 1).reshape(-1, 16, 16)
    return (scales[..., None] * ((low | high << 2).float() - 4)).flatten(1)


def _q3_k_scales(packed: Tensor) -> Tensor:
    """(N, 12) -> (N, 16): 16 low nibbles in 8 bytes, then 16 pairs of high bits in 4 bytes."""
    return _planes(packed[:, :8], 4).flatten(1) | _planes(packed[:, 8:], 2).flatten(1) << 4


def _unpack_q4_k(blocks: Tensor) -> Tensor:
    """d, dmin, 8 x (6-bit scale, 6-bit minimum), 256 nibbles."""
    q = _planes(blocks[:, 16:].view(-1, 4, 32), 4).view(-1, 8, 32)
    return _scaled_k(blocks, q)


def _unpack_q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 256 fifth bits before the nibbles."""
    low = _planes(blocks[:, 48:].view(-1, 4, 32), 4).view(-1, 8, 32)
    return _scaled_k(blocks, low | _planes(blocks[:, 16:48], 1) << 4)


def _scaled_k(blocks: Tensor, q: Tensor) -> Tensor:
    """12 bytes at 4: low 6 bits of bytes 0-3 and 4-7 are the first four scales and minima; their top 2 bits belong to the last
    four, whose low nibbles are in bytes 8-11."""
    first, last = blocks[:, 4:12].view(-1, 2, 4), _planes(blocks[:, 12:16], 4)
    six = torch.cat((first & 63, last | first >> 6 << 4), -1).float()
    scales, minima = _half(blocks, 0) * six[:, 0], _half(blocks, 2) * six[:, 1]
    return (scales[..., None] * q.float() - minima[..., None]).flatten(1)


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    """256 low nibbles, 256 pairs of high bits, 16 x int8 scales, d."""
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    low = _planes(blocks[:, :128].view(-1, 2, 64), 4).view(-1, 2, 4, 32)
    high = _planes(blocks[:, 128:192].view(-1, 2, 32), 2)
    q = (low | high << 4).view(-1, 16, 16).float() - 32
    return (scales[..., None] * q).flatten(1)


_UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q2_K": _unpack_q2_k,
    "Q3_K": _unpack_q3_k,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
}
