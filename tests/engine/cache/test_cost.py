"""What the cache costs, in calls made: it must not grow with what is cached, nor with what was computed long ago."""

from __future__ import annotations

from engine.cache.manager import CacheManager
from engine.cache.radix import Namespace
from tests.engine.cache.cache_scenes import B, calls, ids
from tests.fixtures.scripted_executor import Kind, layout_of


def _long(pages: int, kinds: tuple[Kind, ...] = (None, 40)) -> CacheManager:
    return CacheManager(layout_of(*kinds), [2 * pages + 20] * len(kinds))


def test_confirming_a_decode_costs_the_same_however_long_the_sequence() -> None:
    costs = []
    for pages in (4, 400):
        cache = _long(pages)
        lease = cache.open(Namespace(), ids(1, pages, 3), retention="rest", pin=None, prompt_tokens=pages * B, now=0.0)
        cache.extend(lease, pages * B + 4)
        cache.confirm(lease, pages * B + 3, 0.0)
        lease.tokens.append(1)
        costs.append(calls(lambda cache=cache, lease=lease: cache.confirm(lease, len(lease.tokens), 0.0)))
        lease.tokens += [1] * B
        cache.extend(lease, len(lease.tokens))
        costs.append(calls(lambda cache=cache, lease=lease: cache.confirm(lease, len(lease.tokens), 0.0)))
    assert costs[0] == costs[2] < 30 and costs[1] <= costs[3] + 5 and costs[3] <= costs[1] + 5, costs


def test_a_match_costs_so_much_for_each_page() -> None:
    costs = []
    for pages in (50, 100, 200, 400):
        cache = _long(pages)
        tokens = ids(1, pages)
        lease = cache.open(Namespace(), tokens, retention="rest", pin=None, prompt_tokens=pages * B, now=0.0)
        cache.extend(lease, pages * B)
        cache.confirm(lease, pages * B, 0.0)
        costs.append(calls(lambda cache=cache, tokens=tokens: cache.probe(Namespace(), tokens)))
    assert costs[3] - costs[2] <= 2 * (costs[2] - costs[1]) + 20 and costs[3] <= 400 * 8, costs


def test_a_prompt_that_differs_at_once_costs_little_beside_a_thousand_others() -> None:
    cache = CacheManager(layout_of(None), [1100])
    for kind in range(1000):
        tokens = [7] * 8 + ids(kind + 1, 0, 8)
        lease = cache.open(Namespace(), tokens, retention="rest", pin=None, prompt_tokens=B, now=0.0)
        cache.extend(lease, B)
        cache.confirm(lease, B, 0.0)
        cache.close(lease, 0.0, settled=True)
    assert cache.cached_pages == 1000
    other = [7] * 8 + [5] * 8
    assert cache.probe(Namespace(), other) == 8
    assert calls(lambda: cache.probe(Namespace(), other)) < 300


def test_evicting_one_page_of_many_costs_little() -> None:
    costs = []
    for prompts in (10, 1000):
        cache = CacheManager(layout_of(None), [prompts])
        for kind in range(prompts):
            lease = cache.open(Namespace(), ids(kind + 1, 1), retention="rest", pin=None, prompt_tokens=B, now=float(kind))
            cache.extend(lease, B)
            cache.confirm(lease, B, float(kind))
            cache.close(lease, float(kind), settled=True)
        lease = cache.open(Namespace(), ids(5000, 1), retention="rest", pin=None, prompt_tokens=B, now=9e9)
        costs.append(calls(lambda cache=cache, lease=lease: cache.extend(lease, B)))
        assert cache.evicted_pages == 1
    assert costs[1] <= costs[0] + 20, costs
