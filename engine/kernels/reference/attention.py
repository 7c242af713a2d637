"""Paged attention: the keys and values of each row are gathered by its page list, then plain softmax attention.

Rows with one new token are taken together when their lengths are close (padding at most doubles the work); every other row
is taken alone and cut to its exact length. Masks are made once per step, not per layer. Slots beyond a row's tokens may hold
anything, NaN included, so padded keys and values are zeroed: a weight of 0 alone would not silence them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.ops import AttentionRow, LayerCache
from engine.kernels.reference.cache import dequantise
from engine.kernels.reference.norm import compute_dtype
from engine.models.spec import AttentionSpec
from engine.runtime.batch import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class _Bucket:
    """R rows of n new tokens each, over L gathered key slots."""

    tokens: Tensor  # int64 [R * n], indices into the step's tokens
    pages: Tensor  # int64 [R, M]
    first: int  # slots to drop at the start of the gathered pages, and
    length: int  # how many to keep: L
    visible: Tensor | None  # bool [R, 1, n, L]: the keys that a query sees; None when it is all of them
    padding: Tensor | None  # bool [R, L]: slots that hold no token of the row; None when there are none


@dataclass(frozen=True, slots=True)
class Plan:
    buckets: tuple[_Bucket, ...]


def plan_attention(rows: Sequence[AttentionRow], window: int | None, device: torch.device) -> Plan:
    single = sorted((r for r in rows if r.count == 1), key=lambda r: r.position)
    buckets = [_one(r, window, device) for r in rows if r.count > 1]
    while single:
        limit = 2 * _keys(single[0], window) + PAGE_TOKENS
        taken = [r for r in single if _keys(r, window) <= limit]
        single = [r for r in single if _keys(r, window) > limit]
        buckets.append(_one(taken[0], window, device) if len(taken) == 1 else _several(taken, window, device))
    return Plan(tuple(buckets))


def attend(q: Tensor, cache: LayerCache, plan: Plan, spec: AttentionSpec) -> Tensor:
    out = torch.empty_like(q)
    for bucket in plan.buckets:
        out[bucket.tokens] = _attend(q[bucket.tokens], cache, bucket, spec)
    return out.flatten(1)


def _attend(q: Tensor, cache: LayerCache, bucket: _Bucket, spec: AttentionSpec) -> Tensor:
    """q [R * n, Hq, D] -> the same shape. The query heads of a group become rows of one matrix and share its keys."""
    dtype, rows, groups = compute_dtype(q), bucket.pages.shape[0], spec.heads // spec.kv_heads
    queries = q.to(dtype).view(rows, -1, spec.kv_heads, groups, spec.head_dim).permute(0, 2, 3, 1, 4)
    new = queries.shape[3]
    k, v = _gather(cache.k, cache.k_scale, bucket, dtype), _gather(cache.v, cache.v_scale, bucket, dtype)
    visible = bucket.visible
    if visible is not None and new > 1:
        visible = visible.repeat(1, 1, groups, 1)
    mixed = _weigh(queries.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), visible, spec)
    return mixed.unflatten(2, (groups, new)).permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype)


def _weigh(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttentionSpec) -> Tensor:
    """q [R, Hk, m, D], k and v [R, Hk, L, D], visible bool [R, 1, m, L] -> [R, Hk, m, D]."""
    if spec.softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=spec.scale)
    scores = torch.tanh(q @ k.transpose(2, 3) * (spec.scale / spec.softcap)) * spec.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def _gather(plane: Tensor, scale: Tensor | None, bucket: _Bucket, dtype: torch.dtype) -> Tensor:
    """[P, B, Hk, D] -> [R, L, Hk, D] in `dtype`, its padding zeroed."""
    found = _pages(plane, bucket)
    found = found.to(dtype) if scale is None else dequantise(found, _pages(scale, bucket), dtype)
    return found if bucket.padding is None else found.masked_fill_(bucket.padding[..., None, None], 0)


def _pages(plane: Tensor, bucket: _Bucket) -> Tensor:
    """A copy of the bucket's slots: [P, B, ...] -> [R, L, ...]."""
    found = plane.index_select(0, bucket.pages.flatten()).unflatten(0, bucket.pages.shape).flatten(1, 2)
    return found[:, bucket.first : bucket.first + bucket.length]


def _first_key(row: AttentionRow, window: int | None) -> int:
    """The first cache position that any token of the row may see."""
    return 0 if window is None else max(0, row.position - window + 1)


def _keys(row: AttentionRow, window: int | None) -> int:
    return row.position + row.count - _first_key(row, window)


def _one(row: AttentionRow, window: int | None, device: torch.device) -> _Bucket:
    """A row alone: exactly its visible keys, so nothing is padding."""
    first, end = _first_key(row, window), row.position + row.count
    pages = row.pages[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
    visible = _visible(row, first, window)
    return _Bucket(
        tokens=torch.arange(row.start, row.start + row.count, device=device),
        pages=torch.tensor([pages], device=device),
        first=first % PAGE_TOKENS,
        length=end - first,
        visible=None if bool(visible.all()) else visible[None, None].to(device),
        padding=None,
    )


def _several(rows: Sequence[AttentionRow], window: int | None, device: torch.device) -> _Bucket:
    """Rows of one token, each from the page of its first key on, padded to the longest with page 0."""
    starts = [_first_key(r, window) // PAGE_TOKENS for r in rows]
    pages = [list(r.pages[s : r.position // PAGE_TOKENS + 1]) for r, s in zip(rows, starts, strict=True)]
    most = max(len(p) for p in pages)
    slot = torch.arange(most * PAGE_TOKENS)[None, :]
    low = torch.tensor([_first_key(r, window) - s * PAGE_TOKENS for r, s in zip(rows, starts, strict=True)])[:, None]
    high = torch.tensor([r.position - s * PAGE_TOKENS for r, s in zip(rows, starts, strict=True)])[:, None]
    padding = ((slot < low) | (slot > high)).to(device)
    return _Bucket(
        tokens=torch.tensor([r.start for r in rows], device=device),
        pages=torch.tensor([p + [0] * (most - len(p)) for p in pages], device=device),
        first=0,
        length=most * PAGE_TOKENS,
        visible=~padding[:, None, None],
        padding=padding,
    )


def _visible(row: AttentionRow, first: int, window: int | None) -> Tensor:
    """bool [n, L]: which of the cache positions first .. end - 1 each new token sees."""
    keys = torch.arange(first, row.position + row.count)
    queries = torch.arange(row.position, row.position + row.count)
    visible = keys[None, :] <= queries[:, None]
    if row.tree:
        keys, queries, visible = _tree_visible(row, keys, visible, first)
    if window is not None:
        visible &= queries[:, None] - keys[None, :] < window
    return visible


def _tree_visible(row: AttentionRow, keys: Tensor, visible: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a draft tree: logical positions of keys and queries, and drafts cut down to ancestors and self."""
    tree, plain = row.tree or (), row.count - len(row.tree or ())
    ancestors = torch.eye(len(tree), dtype=torch.bool)
    depth = torch.ones(len(tree), dtype=torch.int64)
    for i, parent in enumerate(tree):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
            depth[i] = depth[parent] + 1
    visible = visible.clone()
    drafts = row.position + plain - first  # the column where drafts begin
    visible[plain:, drafts:] = ancestors
    logical = keys.clone()
    logical[drafts:] = row.position + plain - 1 + depth
    return logical, logical[row.position - first :], visible
