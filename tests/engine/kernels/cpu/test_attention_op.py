"""The paged cache and attention over it, of every instruction set: what is written against the reference to the bit, what is read
within 1e-5 of max |v|, and the scalar kernels' bits everywhere.

Every slot that a test does not write holds NaN, so whatever reads one too many shows.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.kernels.ops import AttentionRow, LayerCache
from engine.kernels.reference import attention, cache
from engine.models.spec import AttentionSpec
from tests.engine.kernels.cpu import op_calls as ops
from tests.engine.kernels.cpu.packed_calls import Refused

TYPES = ("float32", "float16", "int8")
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES, LENGTH, NO_PAGE = 20, 210, -1
# position and window: the first tokens, the ends of pages and of tiles of 64, windows that begin inside of each
SIGHTS = ((0, 0), (1, 0), (15, 0), (16, 0), (63, 0), (64, 0), (65, 7), (130, 1), (140, 64), (209, 100), (209, 0))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@dataclass(frozen=True)
class Sequence:
    """`LENGTH` tokens in pages of no order, in the native cache of every instruction set and in the reference's."""

    native: dict[str, ops.Cache]
    reference: LayerCache
    pages: list[int]
    k: Tensor  # [LENGTH, Hk, D]
    v: Tensor


@functools.cache
def sequence(dtype: str, kv_heads: int, head_dim: int) -> Sequence:
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    k, v = torch.randn(2, LENGTH, kv_heads, head_dim, generator=generator)
    pages = random.Random(7).sample(range(PAGES), -(-LENGTH // 16))
    native = {isa: ops.Cache(dtype, PAGES, kv_heads, head_dim, isa=isa) for isa in ops.isas()}
    for position in range(LENGTH):
        for one in native.values():
            one.write(pages[position // 16], position % 16, k[position], v[position])
    plane = torch.zeros(PAGES, 16, kv_heads, head_dim, dtype=getattr(torch, dtype))
    scale = torch.zeros(PAGES, 16, kv_heads, dtype=torch.float16) if dtype == "int8" else None
    planes = LayerCache(plane, plane.clone(), scale, None if scale is None else scale.clone())
    slots = torch.tensor([pages[position // 16] * 16 + position % 16 for position in range(LENGTH)])
    cache.write_kv(k, v, planes, slots)
    return Sequence(native, planes, pages, k, v)


def queries(kv_heads: int, group: int, head_dim: int) -> Tensor:
    return torch.randn(kv_heads * group, head_dim, generator=torch.Generator().manual_seed(group))


def expected(held: Sequence, q: Tensor, position: int, window: int) -> Tensor:
    """The reference's answer in float64."""
    heads, head_dim = q.shape
    spec = AttentionSpec(heads=heads, kv_heads=held.k.shape[1], head_dim=head_dim, scale=head_dim**-0.5, rope=None)
    plan = attention.plan_attention([AttentionRow(0, 1, position, held.pages)], window or None, torch.device("cpu"))
    return attention.attend(q.double()[None], held.reference, plan, spec).view(heads, head_dim)


def seen(pages: list[int], position: int, window: int) -> list[int]:
    """The page list with none where the window has passed."""
    first = max(0, position + 1 - window) if window else 0
    return [page if i >= first // 16 else NO_PAGE for i, page in enumerate(pages[: position // 16 + 1])]


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 33, 512])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_cache_holds_what_the_reference_writes(dtype: str, head_dim: int) -> None:
    held = sequence(dtype, 2, head_dim)
    slots = [(held.pages[position // 16], position % 16) for position in range(LENGTH)]
    for isa, native in held.native.items():
        for page, slot in slots:
            assert torch.equal(native.k[page, :, :, slot], held.reference.k[page, slot]), isa
            assert torch.equal(native.v[page, :, slot, :head_dim], held.reference.v[page, slot]), isa
            if held.reference.k_scale is not None and held.reference.v_scale is not None:
                assert torch.equal(native.k_scale[page, :, slot], held.reference.k_scale[page, slot]), isa
                assert torch.equal(native.v_scale[page, :, slot], held.reference.v_scale[page, slot]), isa


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_is_that_of_the_reference(dtype: str, head_dim: int) -> None:
    held = sequence(dtype, 2, head_dim)
    bound = 1e-5 * held.v.abs().max()
    for group in range(1, 9):
        q = queries(2, group, head_dim)
        for position, window in SIGHTS[group % 2 :: 2]:
            pages = seen(held.pages, position, window)
            want = expected(held, q, position, window)
            got = held.native["scalar"].attend(pages, position, q, window=window, scale=head_dim**-0.5)
            assert (got - want).abs().max() <= bound, (group, position, window)
            for isa, native in held.native.items():
                again = native.attend(pages, position, q, window=window, scale=head_dim**-0.5)
                assert same_bits(again, got), (isa, group, position, window)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 33), (3, 40), (1, 512)])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_with_unusual_heads(dtype: str, kv_heads: int, head_dim: int) -> None:
    held, q = sequence(dtype, kv_heads, head_dim), queries(kv_heads, 3, head_dim)
    want = expected(held, q, 209, 0)
    for native in held.native.values():
        got = native.attend(held.pages, 209, q, scale=head_dim**-0.5)
        assert (got - want).abs().max() <= 1e-5 * held.v.abs().max()


def test_the_bound_can_fail() -> None:
    """One position too many, or one too few, is far outside of it."""
    held, q = sequence("float32", 2, 64), queries(2, 3, 64)
    for other, window in ((131, 8), (130, 7)):
        want = expected(held, q, other, window)
        got = held.native["scalar"].attend(held.pages, 130, q, window=8, scale=0.125)
        assert (got - want).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", TYPES)
def test_a_head_gets_the_same_bits_in_any_group(dtype: str) -> None:
    held, q = sequence(dtype, 1, 80), queries(1, 8, 80)
    for isa, native in held.native.items():
        together = native.attend(held.pages, 200, q)
        for group in range(1, 8):
            for first in range(8 - group + 1):
                part = native.attend(held.pages, 200, q[first : first + group])
                assert same_bits(part, together[first : first + group]), (isa, group, first)


@pytest.mark.parametrize("dtype", TYPES)
def test_where_pages_lie_changes_nothing(dtype: str) -> None:
    held, q = sequence(dtype, 2, 64), queries(2, 3, 64)
    for isa, native in held.native.items():
        other = ops.Cache(dtype, PAGES + 3, 2, 64, isa=isa)
        pages = [PAGES + 2 - i for i in range(len(held.pages))]
        for position in reversed(range(LENGTH)):
            other.write(pages[position // 16], position % 16, held.k[position], held.v[position])
        for position, window in SIGHTS:
            assert same_bits(
                other.attend(pages, position, q, window=window),
                native.attend(seen(held.pages, position, window), position, q, window=window),
            ), (isa, position, window)


def with_key(dtype: str, isa: str, held: Sequence, position: int, k: Tensor, v: Tensor) -> ops.Cache:
    """A cache of its own with one token's key and value replaced."""
    other = ops.Cache(dtype, PAGES, 2, 64, isa=isa)
    for part in ("k", "v", "k_scale", "v_scale"):
        getattr(other, part).copy_(getattr(held.native[isa], part))
    other.write(held.pages[position // 16], position % 16, k, v)
    return other


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_reaches_only_those_that_see_it(dtype: str) -> None:
    """A NaN in the key of head 0 at position 100: head 1, earlier positions and windows that have passed stay as they were."""
    held, q = sequence(dtype, 2, 64), queries(2, 2, 64)
    k = held.k[100].clone()
    k[0, 5] = math.nan
    for isa, native in held.native.items():
        spoilt = with_key(dtype, isa, held, 100, k, held.v[100])
        for position, window in ((99, 0), (64, 0), (150, 50), (209, 64)):
            assert same_bits(
                spoilt.attend(held.pages, position, q, window=window), native.attend(held.pages, position, q, window=window)
            ), (isa, position, window)
        for position, window in ((100, 0), (100, 1), (150, 51), (209, 0)):
            got, clean = (one.attend(held.pages, position, q, window=window) for one in (spoilt, native))
            assert got[:2].isnan().all(), (isa, position, window)
            assert same_bits(got[2:], clean[2:]), (isa, position, window)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_in_a_value_or_a_query(dtype: str) -> None:
    held, q = sequence(dtype, 2, 64), queries(2, 2, 64)
    v = held.v[100].clone()
    v[1, 9] = math.nan
    asked = q.clone()
    asked[1, 3] = math.nan
    for isa, native in held.native.items():
        clean = native.attend(held.pages, 150, q)
        got = with_key(dtype, isa, held, 100, held.k[100], v).attend(held.pages, 150, q)
        assert same_bits(got[:2], clean[:2])
        assert got[2:, 9].isnan().all()
        got = native.attend(held.pages, 150, asked)
        assert got[1].isnan().all()
        assert same_bits(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_large_scores_do_not_overflow() -> None:
    held, q = sequence("float32", 2, 64), queries(2, 2, 64) * 1e4
    want = expected(held, q, 209, 0)
    for native in held.native.values():
        got = native.attend(held.pages, 209, q, scale=0.125)
        assert (got - want).abs().max() <= 1e-5 * held.v.abs().max()


def test_int8_keys_of_zero_and_of_small_numbers() -> None:
    for isa in ops.isas():
        held = ops.Cache("int8", 1, 1, 64, isa=isa)
        held.write(0, 0, torch.zeros(1, 64), torch.full((1, 64), 1e-9))
        assert not held.k[0, 0, :, 0].any()
        assert held.k_scale[0, 0, 0] == 0
        assert not held.v[0, 0, 0, :64].any()
        assert not held.attend([0], 0, torch.ones(2, 64)).any()


def test_bad_calls_are_refused_with_a_line() -> None:
    held, q = sequence("float32", 2, 64).native["scalar"], queries(2, 2, 64)
    with pytest.raises(Refused, match="outside the cache"):
        held.write(PAGES, 0, torch.zeros(2, 64), torch.zeros(2, 64))
    with pytest.raises(Refused, match="outside the cache"):
        held.attend([0, PAGES], 20, q)
    with pytest.raises(Refused, match="too few pages"):
        held.attend([0], 16, q)
