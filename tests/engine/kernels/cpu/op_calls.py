"""The single operations of cavectl.h over torch tensors, and random packed matrices of every kind.

Not here: what is expected of them. A matrix's bytes are random up to its last lane, those behind the last row too, so that nothing
may depend on them; its weights are what cavectl_unpack says.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cpu.lib import load
from engine.weights.packed_layout import Kind, tensor_bytes
from tests.engine.kernels.cpu.packed_calls import BITS, SCALES, WITH_MINIMUMS, Refused, unpack_raw

FLOAT_KINDS = (Kind.F32, Kind.F16, Kind.BF16)
INTEGER_KINDS = (Kind.Q4_S, Kind.Q4_M, Kind.Q4_M16, Kind.Q8_S, Kind.Q8_M, Kind.Q8_S16)
_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_CACHE_TYPES = ("float32", "float16", "int8")  # in the order of kernels.h
BEST = ""


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_uint32),
        ("exponent", ctypes.c_int32),
    )


class _Cache(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("head_dim", ctypes.c_uint32),
        ("pages", ctypes.c_uint64),
        ("kv_heads", ctypes.c_uint64),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
    )


def isas() -> tuple[str, ...]:
    """Those that this machine runs; `scalar`, which all must equal, is one of them."""
    return load().isas


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    kind: Kind
    rows: int
    columns: int
    exponent: int
    packed: Tensor  # uint8
    bias: Tensor | None  # float32 [rows]

    @property
    def weights(self) -> Tensor:
        """float64 [rows, columns]."""
        return unpack_raw(self.kind, self.exponent, bytes(self.packed.numpy()), self.rows, self.columns, 0, self.rows).double()

    @property
    def struct(self) -> _Matrix:
        bias = None if self.bias is None else self.bias.data_ptr()
        return _Matrix(self.packed.data_ptr(), len(self.packed), self.rows, self.columns, bias, self.kind, self.exponent)


def random_matrix(kind: Kind, rows: int, columns: int, *, seed: int = 0, bias: bool = False, exponent: int = 0) -> PackedMatrix:
    generator = torch.Generator().manual_seed(seed)
    lanes = -(-rows // 16) * 16
    if kind in _FLOATS:
        packed = torch.randn(lanes * columns, generator=generator).to(_FLOATS[kind]).view(torch.uint8)
    else:
        numbers = 16 * 32 * BITS[kind] // 8
        halves = 16 * SCALES.get(kind, 1) * (2 if kind in WITH_MINIMUMS else 1)
        blocks = lanes // 16 * columns // 32
        stored = torch.randint(0, 256, (blocks, numbers), generator=generator).to(torch.uint8)
        scales = (torch.randn(blocks, halves, generator=generator) * 0.01).half()
        packed = torch.cat([stored, scales.view(torch.uint8)], 1).flatten()
    assert len(packed) == tensor_bytes(kind, rows, columns)
    vector = torch.randn(rows, generator=generator) if bias else None
    return PackedMatrix(kind, rows, columns, exponent, packed.contiguous(), vector)


def matmul(w: PackedMatrix, x: Tensor, *, isa: str = BEST, run: int = 1 << 20, add: Tensor | None = None) -> Tensor:
    """x float32 [T, columns] -> [T, rows]; with `add` [T, rows], added to it."""
    y = torch.full((len(x), w.rows), 7.0) if add is None else add.clone()
    x = x.contiguous()
    _call("matmul", isa, ctypes.byref(w.struct), _at(x), len(x), run, int(add is not None), _at(y))
    return y


def feed(gate: PackedMatrix | None, up: PackedMatrix, activation: int, x: Tensor, *, isa: str = BEST, run: int = 1 << 20) -> Tensor:
    y = torch.empty(len(x), up.rows)
    x = x.contiguous()
    gates = None if gate is None else ctypes.byref(gate.struct)
    _call("feed", isa, gates, ctypes.byref(up.struct), activation, _at(x), len(x), run, _at(y))
    return y


def quantise(x: Tensor, *, isa: str = BEST) -> tuple[Tensor, Tensor]:
    """int8 values [T, columns], float32 scales [T, columns / 32]."""
    q = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(len(x), x.shape[1] // 32)
    _call("quantise", isa, _at(x), len(x), x.shape[1], _at(q), _at(scales))
    return q, scales


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, isa: str = BEST) -> Tensor:
    y = torch.empty_like(x)
    _call("rms_norm", isa, _at(x), _at(weight), len(x), x.shape[1], epsilon, _at(y))
    return y


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, isa: str = BEST) -> Tensor:
    """x [n] and tables [n / 2 or less] of one head."""
    y = x.clone()
    _call("rotate", isa, _at(y), _at(cosine), _at(sine), len(cosine))
    return y


class Cache:
    """Keys and values of one layer. Every slot begins as what must never be seen: NaN, or int8 numbers with a scale of NaN."""

    def __init__(self, dtype: str, pages: int, kv_heads: int, head_dim: int, *, isa: str = BEST) -> None:
        self._isa, self.kv_heads, self.head_dim = isa, kv_heads, head_dim
        kind, fill = getattr(torch, dtype), 99 if dtype == "int8" else torch.nan
        width = -(-head_dim // 16) * 16
        self.k = torch.full((pages, kv_heads, head_dim, 16), fill, dtype=kind)
        self.v = torch.full((pages, kv_heads, 16, width), fill, dtype=kind)
        self.k_scale, self.v_scale = (torch.full((pages, kv_heads, 16), torch.nan, dtype=torch.float16) for _ in range(2))
        parts = (self.k, self.v, self.k_scale, self.v_scale)
        self._struct = _Cache(_CACHE_TYPES.index(dtype), head_dim, pages, kv_heads, *(part.data_ptr() for part in parts))

    def write(self, page: int, slot: int, k: Tensor, v: Tensor) -> None:
        """k, v float32 [Hk, D]."""
        k, v = k.contiguous(), v.contiguous()
        _call("write_kv", self._isa, ctypes.byref(self._struct), page, slot, _at(k), _at(v))

    def attend(self, pages: list[int], position: int, q: Tensor, *, window: int = 0, scale: float = 1.0) -> Tensor:
        """q float32 [Hq, D] -> [Hq, D]."""
        q, out = q.contiguous(), torch.empty_like(q)
        numbers = (ctypes.c_int32 * len(pages))(*pages)
        group = len(q) // self.kv_heads
        _call(
            "attend", self._isa, ctypes.byref(self._struct), numbers, len(pages), position, window, _at(q), group, scale, _at(out)
        )
        return out


def _at(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _call(name: str, isa: str, *arguments: Any) -> None:
    """Raises Refused with the library's line."""
    error = ctypes.create_string_buffer(512)
    if getattr(load().functions, f"cavectl_op_{name}")(isa.encode(), *arguments, error):
        raise Refused(error.value.decode())
