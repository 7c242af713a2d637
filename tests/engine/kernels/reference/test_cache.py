"""Writing, quantising and copying pages of the KV cache."""

from __future__ import annotations

import math

import pytest
import torch

from engine.cache.layout import Plane
from engine.kernels.ops import LayerCache, layer_cache
from engine.kernels.reference import ReferenceOps
from engine.kernels.reference.cache import quantise
from engine.runtime.batch import PAGE_TOKENS

OPS = ReferenceOps()


def plane(name: str, dtype: str, *shape: int) -> torch.Tensor:
    return OPS.allocate_plane(4, Plane(name, 0, dtype, shape))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_write_puts_each_token_in_its_slot(dtype: str) -> None:
    cache = layer_cache({"k": plane("k", dtype, 2, 3), "v": plane("v", dtype, 2, 3)})
    k, v = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    slots = [17, 3, 63, 0, 32]
    OPS.write_kv(k, v, cache, torch.tensor(slots))
    for given, stored in ((k, cache.k), (v, cache.v)):
        expected = torch.zeros_like(stored)
        for t, slot in enumerate(slots):
            expected[slot // PAGE_TOKENS, slot % PAGE_TOKENS] = given[t].to(stored.dtype)
        assert torch.equal(stored, expected)


def naive_int8(values: list[float]) -> tuple[list[int], float]:
    scale = float(torch.tensor(max(abs(v) for v in values) / 127, dtype=torch.float32).to(torch.float16))
    if scale == 0:
        return [0] * len(values), 0.0
    exact = [torch.tensor(v, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32) for v in values]
    return [max(-127, min(127, round(float(v)))) for v in exact], scale  # Python rounds half to even


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-7, 300.0])  # 1e-5: a coarse subnormal scale, so values are clamped
def test_int8_equals_a_loop(size: float) -> None:
    x = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(1)) * size
    x[3, 1] = 0
    values, scales = quantise(x)
    assert values.dtype == torch.int8 and scales.dtype == torch.float16
    for t in range(20):
        for head in range(2):
            expected, scale = naive_int8(x[t, head].tolist())
            assert float(scales[t, head]) == scale
            assert values[t, head].tolist() == expected


def test_int8_is_within_half_a_step() -> None:
    x = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(2))
    values, scales = quantise(x)
    wide = values.float() * scales.float()[..., None]
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((wide - x).abs() <= step * (0.5 + 127 / 2048 + 1e-3)).all()  # float16 rounds the scale by up to 1/2048


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_int8_does_not_hide_what_is_not_finite(bad: float) -> None:
    x = torch.ones(1, 1, 4)
    x[0, 0, 2] = bad
    values, scales = quantise(x)
    assert not (values.float() * scales.float()[..., None]).isfinite().all()


def test_int8_write_fills_both_planes() -> None:
    cache = LayerCache(plane("k", "int8", 2, 4), plane("v", "int8", 2, 4), plane("k", "float16", 2), plane("v", "float16", 2))
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    OPS.write_kv(k, v, cache, torch.tensor([40, 1, 16]))
    assert cache.k_scale is not None and cache.v_scale is not None
    for t, (page, offset) in enumerate([(2, 8), (0, 1), (1, 0)]):
        for given, stored, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
            values, scale = quantise(given[t : t + 1])
            assert torch.equal(stored[page, offset], values[0])
            assert torch.equal(scales[page, offset], scale[0])


def test_copy_pages() -> None:
    stored = plane("k", "float32", 2, 3)
    stored.copy_(torch.randn(stored.shape))
    before = stored.clone()
    OPS.copy_pages(stored, torch.tensor([3, 3]), torch.tensor([0, 2]))
    assert torch.equal(stored, before[[3, 1, 3, 3]])
