"""What the cache costs, in calls made: it must not grow with what is cached, nor with what was computed long ago."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest

from engine.cache import eviction, radix
from engine.cache.lease import Lease
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


class Visits:
    """Counts looks into children, and entries taken from queues, of a whole cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children = self.popped = self.touched = 0
        visits = self

        class Line(dict[bytes, radix.Node]):
            def get(self, key: bytes, default: object = None) -> radix.Node | None:  # pyright: ignore[reportIncompatibleMethodOverride]
                visits.children += 1
                return super().get(key)

        class Counted(radix.Node):
            def __init__(self, *fields: object) -> None:
                super().__init__(*fields)  # pyright: ignore[reportArgumentType]
                self.children = Line()

            def __setattr__(self, name: str, value: object) -> None:
                visits.touched += name in ("used", "rank")
                super().__setattr__(name, value)

        def pop(queue: list[object]) -> object:
            self.popped += 1
            return heapq.heappop(queue)

        monkeypatch.setattr(radix, "Node", Counted)
        monkeypatch.setattr(eviction, "heappop", pop)

    def of(self, work: Callable[[], object]) -> tuple[int, int, int]:
        """(children looked up, entries popped, times of use or classes written) by `work`."""
        before = (self.children, self.popped, self.touched)
        work()
        return self.children - before[0], self.popped - before[1], self.touched - before[2]


def _run(cache: CacheManager, tokens: list[int], now: float = 0.0) -> Lease:
    lease = cache.open(Namespace(), tokens, retention="rest", pin=None, prompt_tokens=len(tokens), now=now)
    cache.extend(lease, len(tokens))
    cache.confirm(lease, len(tokens), now)
    return lease


def test_a_decode_visits_no_node_and_one_that_fills_a_page_that_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits(monkeypatch)
    cache = _long(400, (None, 40, "state"))
    lease = _run(cache, ids(1, 300, B - 3))
    for count in range(1, 3 * B):
        lease.tokens.append(count)
        cache.extend(lease, len(lease.tokens))
        looked, popped, written = visits.of(lambda: cache.confirm(lease, len(lease.tokens), 1.0))
        if len(lease.tokens) % B:
            assert (looked, popped, written) == (0, 0, 0)
        else:
            assert looked == 1 and popped == 0 and 0 < written <= 4
    assert lease.registered == len(lease.tokens) // B * B == 303 * B


@pytest.mark.parametrize("at", [0, 100, 249])
def test_a_match_looks_up_one_child_a_page_whatever_hangs_beside_the_path(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,000 tokens; 2,000 others leave the path at its first page, in the middle or at its end, by every token of a page."""
    visits = Visits(monkeypatch)
    cache = CacheManager(layout_of(None), [5000])
    tokens = ids(1, 250)
    cache.close(_run(cache, tokens), 0.0, settled=True)
    for kind in range(2000):
        same = at * B + kind % B
        cache.close(_run(cache, [*tokens[:same], *ids(2 + kind, 0, (at + 1) * B - same)]), 0.0, settled=True)
    assert cache.cached_pages == 2250
    for probed, hit in ((tokens, 4000 - 1), ([*tokens[: at * B + 9], *ids(1, 0, 9)], at * B + 9)):
        found: list[int] = []
        looked, *rest = visits.of(lambda probed=probed, found=found: found.append(cache.probe(Namespace(), probed)))
        assert found == [hit] and hit // B <= looked <= len(probed) // B + 1 and rest == [0, 0]
        assert calls(lambda probed=probed: cache.probe(Namespace(), probed)) < 300 + 4 * (len(probed) // B)


@pytest.mark.parametrize("kinds", [(None,), (None, 40), (20,)])
def test_evicting_so_many_pages_takes_as_many_entries(kinds: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of four pages, nothing used again: for each page evicted in one group at most one entry in each comes up."""
    visits = Visits(monkeypatch)
    cache = CacheManager(layout_of(*kinds), [400] * len(kinds))
    for kind in range(100):
        cache.close(_run(cache, ids(kind + 1, 4), float(kind)), float(kind), settled=True)
    assert [group.free for group in cache.groups] == [0] * len(kinds)
    lease = cache.open(Namespace(), ids(5000, 200), retention="rest", pin=None, prompt_tokens=1, now=1e3)
    for pages in (1, 10, 200):
        had, before = len(lease.pages[0]), cache.evicted_pages
        _, popped, _ = visits.of(lambda pages=pages: cache.extend(lease, pages * B))
        assert cache.evicted_pages - before >= pages - had
        assert pages - had <= popped <= len(kinds) * (pages - had + 4), "more is looked at than goes"


def test_what_is_used_again_and_again_costs_one_entry_each_time_it_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hot prefix among many that die: the queue stays short and what is stale is put right once for each use."""
    visits = Visits(monkeypatch)
    cache = CacheManager(layout_of(None), [64])
    hot = ids(1, 4)
    for kind in range(2, 1000):
        now = float(kind)
        cache.close(_run(cache, [*hot], now), now, settled=True)
        _, popped, _ = visits.of(lambda kind=kind, now=now: cache.close(_run(cache, ids(kind, 4), now), now, settled=True))
        assert popped <= 12, popped
        assert sum(len(queue) for queues in cache._eviction._queues for queue in queues) <= 2 * 64 + 1
        assert cache.probe(Namespace(), hot) == 4 * B - 1
