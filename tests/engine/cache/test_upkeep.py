"""The cache after a long time, and at its edges: nothing piles up, nothing is walked over in vain, no promise is too much."""

from __future__ import annotations

import time

import pytest

from engine.cache.manager import CacheManager
from engine.cache.radix import Namespace
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS
from tests.engine.cache.cache_run import CacheRun
from tests.engine.cache.cache_scenes import B, cached, calls, ids, make_room
from tests.fixtures.scripted_executor import Kind, layout_of

REST_S = 300.0


def finish(cache: CacheManager, tokens: list[int], now: float, salt: str = "") -> None:
    """A sequence from its start to its end, without a memory that checks it."""
    lease = cache.open(Namespace(salt=salt), tokens, retention="rest", pin=None, prompt_tokens=len(tokens), now=now)
    cache.extend(lease, len(tokens))
    cache.confirm(lease, len(tokens), now)
    cache.close(lease, now, settled=True)


def hollow(run: CacheRun, group: int) -> None:
    """Have every page of a group evicted that nobody holds."""
    index = run.cache.groups[group]
    taken = [run.cache._take(group) for _ in range(index.at_hand)]
    for page in taken:
        index.disown(page)
    run.check()


# --- nothing piles up ------------------------------------------------------------------------------------------------------------


def test_what_is_gone_leaves_no_entries_behind() -> None:
    cache = CacheManager(layout_of(None, 40), [50, 50])
    for kind in range(1, 400):
        now = kind * 400.0
        finish(cache, ids(kind, 3, 5), now, salt=str(kind))
        cache.expire(now + REST_S)
        assert cache.cached_pages == 0
    queues = [queue for by_class in cache._eviction._queues for queue in by_class]
    assert sum(len(queue) for queue in queues) <= 4 * sum(group.total for group in cache.groups)
    assert not cache._tree._roots


def test_namespaces_whose_pages_were_evicted_are_forgotten() -> None:
    cache = CacheManager(layout_of(None), [8])
    for kind in range(1, 100):
        finish(cache, ids(kind, 4), float(kind), salt=str(kind))
        cache.expire(float(kind))
    assert len(cache._tree._roots) <= 2


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("computed", [0, 20])
def test_namespaces_of_sequences_that_left_nothing_are_forgotten(sharing: bool, computed: int) -> None:
    """A client with a new salt for every request, whose requests fail, are cancelled at once or run without sharing."""
    cache = CacheManager(layout_of(None), [50], sharing=sharing)
    running = cache.open(Namespace(salt="0"), [1], retention="rest", pin=None, prompt_tokens=1, now=0.0)
    for kind in range(100):
        name = Namespace(salt=str(kind))
        lease = cache.open(name, ids(1, 1, 4), retention="rest", pin=None, prompt_tokens=20, now=1.0)
        cache.extend(lease, 20)
        cache.confirm(lease, computed, 1.0)
        cache.discard(lease)
        cache.expire(1.0)
    assert list(cache._tree._roots.values()) == [running.root], "only that of the one that runs is left"


# --- cost ------------------------------------------------------------------------------------------------------------------------


def test_expiring_one_prefix_of_many_costs_little() -> None:
    costs = []
    for prompts in (10, 1000):
        cache = CacheManager(layout_of(None), [prompts + 1])
        finish(cache, ids(5000, 1), 0.0)
        for kind in range(1, prompts):
            finish(cache, ids(kind, 1), 100.0)
        costs.append(calls(lambda cache=cache: cache.expire(REST_S + 1)))
        assert cache.cached_pages == prompts - 1
    assert costs[1] <= costs[0] + 20, costs


@pytest.mark.timing
@pytest.mark.parametrize("kinds", [(None, 500), (None, "state")])
def test_a_long_prefix_that_cannot_be_served_is_found_out_in_linear_time(kinds: tuple[Kind, ...]) -> None:
    """Every page of it is there, and no page of its window, or no snapshot."""
    seconds = []
    for pages in (500, 4000):
        run = CacheRun(kinds, [pages + 1, pages + 1])
        lease = run.open(ids(1, pages))
        run.cache.extend(lease, pages * B)
        run.cache.confirm(lease, pages * B, 0.0)
        run.close(lease, settled=False)
        hollow(run, 1)
        tokens = ids(1, pages, 1)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            assert run.cache.probe(Namespace(), tokens) == 0
            times.append(time.perf_counter() - started)
        seconds.append(min(times))
    assert seconds[1] < 16 * seconds[0], seconds


# --- what goes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [20, "state"])
def test_a_failed_sequence_leaves_nothing_at_pages_that_were_there_before(kind: Kind) -> None:
    run = CacheRun((None, kind), [30, 10])
    run.through(ids(1, 4))
    hollow(run, 1)
    assert (before := run.cache.held())[1] == []
    lease = run.open(ids(1, 4, 20))
    while run.feed(lease, 2 * B):
        pass
    run.discard(lease)
    assert run.cache.held() == before


def test_clearing_leaves_only_what_leases_hold() -> None:
    run = CacheRun((None, 20), [20, 20])
    lease = run.open(ids(1, 6))
    while run.feed(lease, B):
        pass
    assert run.cache.cached_pages > 0
    run.cache.clear()
    run.check()
    assert run.cache.cached_pages == 0 and lease.computed == 6 * B


def test_a_tail_that_is_copied_from_counts_as_used() -> None:
    run = CacheRun((None,), [20])
    for _ in range(4):
        run.through(ids(1, 1, 8))
        run.now += 0.7 * REST_S
        run.cache.expire(run.now)
    assert cached(run, ids(1, 1, 8)) == B + 8


def test_an_unpinned_prefix_goes_in_the_class_it_has_then() -> None:
    run = CacheRun((None,), [6])
    run.through(ids(1, 2), retention="chat")
    run.through(ids(2, 2), retention="chat")
    run.now += 1
    run.through(ids(1, 2), retention="chat", pin=True)
    run.through(ids(1, 2), pin=False)
    assert run.cache.pinned_pages == 0
    make_room(run, 4)
    assert (cached(run, ids(1, 2)), cached(run, ids(2, 2))) == (0, 2 * B), "it is newer, and no longer a chat's"


def test_pages_that_a_window_passes_expire_while_the_sequence_runs() -> None:
    run = CacheRun((None, 20), [40, 40])
    lease = run.open(ids(1, 6))
    while run.feed(lease, B):
        pass
    passed = run.cache.groups[1].cached
    run.now = 2 * REST_S
    run.cache.expire(run.now)
    assert passed > 0 and run.cache.groups[1].cached == 0
    run.check()
    assert lease.pages[1][-1] != NO_PAGE


# --- promises --------------------------------------------------------------------------------------------------------------------


def test_pinned_pages_that_come_later_are_reckoned_with() -> None:
    """A pinned prompt of ten pages has two snapshots at first; others that part from it leave one at each page."""
    run = CacheRun(("state",), [12])
    assert run.cache.can_pin(10 * B, 200, 0)
    run.through(ids(1, 10), pin=True)
    assert not run.cache.can_pin(5 * B, 200, 0)
    for pages in range(1, 10):
        run.through([*ids(1, pages), *ids(1 + pages, 1)])
        run.through(ids(1, pages))
    assert run.cache.shortage(200) is None, "no state is left for anybody"


def test_a_page_that_somebody_else_holds_is_not_had_again_when_the_window_passes_it() -> None:
    """The first of four pages is another's, the second cached. The sequence needs four at once, when it is past the first."""
    run = CacheRun((40,), [4])
    run.through(ids(1, 2))
    other = run.open(ids(1, 1, 1))
    assert other.hit == B and other.pages[0] == [0]
    longer = ids(1, 4, 13)
    assert run.cache.probe(Namespace(), longer) == 2 * B
    assert not run.cache.can_start(Namespace(), longer, 0)
    assert run.cache.can_start(Namespace(), ids(1, 4), 0)
    lease = run.open(ids(1, 4))
    while lease.computed < 4 * B:
        assert run.feed(lease, 1)


def test_room_is_made_without_touching_what_is_held() -> None:
    run = CacheRun((None, 20), [10, 10])
    run.through(ids(1, 4))
    lease = run.open(ids(1, 4, 3))
    make_room(run, run.cache.groups[0].at_hand)
    while run.feed(lease, PAGE_TOKENS):
        pass
    assert lease.computed == 4 * B + 3
