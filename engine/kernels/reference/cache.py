"""The paged cache: planes [pages, slots, ...], keys and values written by flat slot (page * slots + offset), copied by page."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from engine.cache.layout import Plane
from engine.kernels.ops import LayerCache

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


def allocate_plane(pages: int, plane: Plane, page_slots: int, device: torch.device) -> Tensor:
    """On the CPU from an anonymous mapping: zeros that take no memory until a page is written (torch.zeros touches every one)."""
    shape, dtype = (pages, page_slots, *plane.shape), DTYPES[plane.dtype]
    size = pages * page_slots * plane.bytes_per_token
    try:
        if device.type != "cpu" or not size:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise MemoryError(f"no {size} bytes for a plane of the cache") from error


def write_kv(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    _write(k, cache.k, cache.k_scale, slots)
    _write(v, cache.v, cache.v_scale, slots)


def copy_pages(plane: Tensor, sources: Tensor, targets: Tensor) -> None:
    plane[targets] = plane[sources]


def copy_slots(plane: Tensor, sources: Tensor, targets: Tensor) -> None:
    flat = plane.flatten(0, 1)
    flat[targets] = flat[sources]


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, Hk, D] -> int8 values [T, Hk, D] and float16 scales [T, Hk]."""
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(-1) / 127).to(torch.float16)
    divisor = scale.to(torch.float32)[..., None]
    values = torch.where(divisor > 0, wide / divisor, 0.0).round().clamp(-127, 127)
    return values.to(torch.int8), scale


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) * scale.to(dtype)[..., None]


def _write(x: Tensor, plane: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    if scales is None:
        plane.flatten(0, 1).index_copy_(0, slots, x.to(plane.dtype))
        return
    values, scale = quantise(x)
    plane.flatten(0, 1).index_copy_(0, slots, values)
    scales.flatten(0, 1).index_copy_(0, slots, scale)
