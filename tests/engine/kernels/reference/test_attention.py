"""Paged attention of the reference against a loop over tokens, heads and keys that looks every key up in its page."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from engine.cache.layout import Plane
from engine.kernels.ops import AttentionRow, LayerCache
from engine.kernels.reference import ReferenceOps
from engine.kernels.reference.attention import plan_attention
from engine.models.spec import AttentionSpec
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS

OPS = ReferenceOps()
PAGES = 64


def depth(tree: Sequence[int], i: int) -> int:
    return 1 if tree[i] < 0 else 1 + depth(tree, tree[i])


def visible(row: AttentionRow, i: int, window: int | None) -> list[int]:
    """Cache positions that the i-th new token of the row sees, by the words of the contract."""
    tree = list(row.tree or [])
    plain = row.count - len(tree)
    if i < plain:
        seen = list(range(row.position + i + 1))
        logical = {t: t for t in seen}
    else:
        path, at = [], i - plain
        while at >= 0:
            path.append(at)
            at = tree[at]
        seen = list(range(row.position + plain)) + [row.position + plain + d for d in sorted(path)]
        logical = {t: t for t in range(row.position + plain)}
        logical |= {row.position + plain + d: row.position + plain - 1 + depth(tree, d) for d in path}
    own = logical[row.position + i]
    return [t for t in seen if window is None or own - logical[t] < window]


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[AttentionRow], spec: AttentionSpec) -> torch.Tensor:
    out = torch.zeros_like(q)
    for row in rows:
        for i in range(row.count):
            for head in range(spec.heads):
                shared = head * spec.kv_heads // spec.heads
                scores, values = [], []
                for t in visible(row, i, spec.window):
                    page, offset = row.pages[t // PAGE_TOKENS], t % PAGE_TOKENS
                    score = float(q[row.start + i, head] @ k[page, offset, shared]) * spec.scale
                    scores.append(score if spec.softcap is None else spec.softcap * math.tanh(score / spec.softcap))
                    values.append(v[page, offset, shared])
                weights = torch.tensor(scores, dtype=q.dtype).softmax(0)
                out[row.start + i, head] = sum(w * x for w, x in zip(weights, values, strict=True))
    return out.flatten(1)


def scenario(
    rng: random.Random, spec: AttentionSpec, shapes: Sequence[tuple[int, int, Sequence[int] | None]]
) -> tuple[list[AttentionRow], torch.Tensor, LayerCache]:
    """Rows of (position, count, tree) over random pages; every slot that no row owns is NaN."""
    free = list(range(PAGES))
    rng.shuffle(free)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    k, v = (torch.full((PAGES, PAGE_TOKENS, spec.kv_heads, spec.head_dim), torch.nan, dtype=torch.float64) for _ in range(2))
    rows, start = [], 0
    for position, count, tree in shapes:
        end = position + count
        pages = [free.pop() for _ in range(-(-end // PAGE_TOKENS))]
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for t in range(first // PAGE_TOKENS * PAGE_TOKENS, end):
            for plane in (k, v):
                shape = (spec.kv_heads, spec.head_dim)
                plane[pages[t // PAGE_TOKENS], t % PAGE_TOKENS] = torch.randn(*shape, generator=generator, dtype=torch.float64)
        pages[: first // PAGE_TOKENS] = [NO_PAGE] * (first // PAGE_TOKENS)
        rows.append(AttentionRow(start, count, position, pages, tree))
        start += count
    q = torch.randn(start, spec.heads, spec.head_dim, generator=generator, dtype=torch.float64)
    return rows, q, LayerCache(k, v)


def check(rng: random.Random, spec: AttentionSpec, shapes: Sequence[tuple[int, int, Sequence[int] | None]]) -> None:
    rows, q, cache = scenario(rng, spec, shapes)
    got = OPS.attend(q, cache, OPS.plan_attention(rows, spec.window), spec)
    torch.testing.assert_close(got, naive(q, cache.k, cache.v, rows, spec), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 8, 40])
def test_mixed_rows(heads: int, kv_heads: int, softcap: float | None, window: int | None) -> None:
    rng = random.Random(heads)
    spec = AttentionSpec(heads, kv_heads, 6, 0.4, None, window=window, softcap=softcap)
    for _ in range(4):
        shapes = [(rng.randrange(60), rng.choice([1, 1, 1, 2, 7, 20]), None) for _ in range(rng.randrange(1, 9))]
        check(rng, spec, shapes)


@pytest.mark.parametrize("position", [0, 1, 14, 15, 16, 31])
@pytest.mark.parametrize("count", [1, 2, 16, 17])
def test_page_edges(position: int, count: int) -> None:
    for window in (None, 16):
        check(random.Random(1), AttentionSpec(2, 1, 4, 1.0, None, window=window), [(position, count, None)] * 3)


@pytest.mark.parametrize("window", [None, 3, 8])
def test_draft_trees(window: int | None) -> None:
    rng = random.Random(window or 0)
    spec = AttentionSpec(4, 2, 6, 0.4, None, window=window)
    for _ in range(8):
        shapes: list[tuple[int, int, Sequence[int] | None]] = [(rng.randrange(40), rng.choice([1, 5]), None)]
        for _ in range(3):
            tree = [rng.randrange(-1, i) if i else -1 for i in range(rng.randrange(1, 9))]
            shapes.append((rng.randrange(40), rng.choice([1, 2, 4]) + len(tree), tree))
        rng.shuffle(shapes)
        check(rng, spec, shapes)


def test_a_chain_of_drafts_is_plain_decoding() -> None:
    spec = AttentionSpec(4, 2, 6, 0.4, None, window=5)
    rows, q, cache = scenario(random.Random(3), spec, [(20, 6, None)])
    plain = OPS.attend(q, cache, OPS.plan_attention(rows, 5), spec)
    chained = [AttentionRow(0, 6, 20, rows[0].pages, [-1, 0, 1, 2])]
    assert torch.equal(OPS.attend(q, cache, OPS.plan_attention(chained, 5), spec), plain)


def test_single_tokens_are_batched_with_bounded_padding() -> None:
    """Very different lengths are not padded to one another: at most double plus a page."""
    lengths = [3, 5, 30, 31, 500, 510, 1000, 5000]
    rows = [AttentionRow(i, 1, n, list(range(n // PAGE_TOKENS + 1))) for i, n in enumerate(lengths)]
    plan = plan_attention(rows, None, torch.device("cpu"))
    assert len(plan.buckets) < len(rows)
    for bucket in plan.buckets:
        real = [lengths[i] + 1 for i in bucket.tokens.tolist()]
        assert bucket.length <= 2 * min(real) + 2 * PAGE_TOKENS
    assert sorted(i for b in plan.buckets for i in b.tokens.tolist()) == list(range(len(rows)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_queries_and_caches_are_computed_wide(dtype: torch.dtype) -> None:
    spec = AttentionSpec(4, 2, 6, 0.4, None)
    rows, q, cache = scenario(random.Random(3), spec, [(20, 1, None), (33, 1, None), (0, 9, None)])
    narrow = LayerCache(cache.k.to(dtype), cache.v.to(dtype))
    got = OPS.attend(q.to(dtype), narrow, OPS.plan_attention(rows, None), spec)
    assert got.dtype == dtype
    expected = naive(q.to(dtype).double(), narrow.k.double(), narrow.v.double(), rows, spec)
    within = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, atol=max(within, 1e-5), rtol=within)


def test_int8_cache_is_attended_as_dequantised() -> None:
    spec = AttentionSpec(4, 2, 6, 0.4, None)
    rows, q, cache = scenario(random.Random(3), spec, [(20, 1, None), (33, 1, None), (0, 9, None)])
    planes = {n: OPS.allocate_plane(PAGES, Plane(n, 0, "int8", (2, 6))) for n in ("k", "v")}
    scales = {n: OPS.allocate_plane(PAGES, Plane(n, 0, "float16", (2,))) for n in ("k", "v")}
    int8 = LayerCache(planes["k"], planes["v"], scales["k"], scales["v"])
    OPS.write_kv(cache.k.flatten(0, 1), cache.v.flatten(0, 1), int8, torch.arange(PAGES * PAGE_TOKENS))
    wide = [(planes[n].double() * scales[n].double()[..., None]) for n in ("k", "v")]
    got = OPS.attend(q, int8, OPS.plan_attention(rows, None), spec)
    torch.testing.assert_close(got, naive(q, wide[0], wide[1], rows, spec), atol=1e-12, rtol=0)
