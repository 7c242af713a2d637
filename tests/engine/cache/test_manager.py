"""What the cache keeps, for how long and who goes first, in small scenes; random lives are in test_cache.py."""

from __future__ import annotations

import pytest

from engine.cache.radix import Namespace
from engine.runtime.batch import NO_PAGE
from tests.engine.cache.cache_run import CacheRun
from tests.engine.cache.cache_scenes import B, cached, ids, make_room
from tests.engine.cache.weak_keys import weaken
from tests.fixtures.scripted_executor import Kind

REST_S, CHAT_S = 300.0, 1800.0


# --- who goes --------------------------------------------------------------------------------------------------------------------


def test_the_rest_goes_before_chats_and_the_longest_unused_first() -> None:
    run = CacheRun((None,), [8])
    order = [(1, "chat"), (2, "rest"), (3, "chat"), (4, "rest")]
    for kind, retention in order:
        run.now += 1
        run.through(ids(kind, 2), retention=retention)
    gone: list[int] = []
    for _ in range(8):
        make_room(run, len(gone) + 1)
        gone += [kind for kind, _ in order if cached(run, ids(kind, 2)) < 2 * B and gone.count(kind) == 0]
        gone += [kind for kind, _ in order if cached(run, ids(kind, 2)) == 0 and gone.count(kind) == 1]
    assert gone == [2, 2, 4, 4, 1, 1, 3, 3]
    assert run.cache.evicted_pages == 8


def test_what_is_used_again_counts_as_new() -> None:
    run = CacheRun((None,), [4])
    for kind in (1, 2):
        run.now += 1
        run.through(ids(kind, 2))
    run.now += 1
    run.through(ids(1, 2))
    make_room(run, 2)
    assert (cached(run, ids(1, 2)), cached(run, ids(2, 2))) == (2 * B, 0)


def test_of_one_prefix_the_deepest_page_goes_first() -> None:
    run = CacheRun((None,), [4])
    run.through(ids(1, 4))
    for pages in (1, 2, 3):
        make_room(run, pages)
        assert cached(run, ids(1, 4)) == (4 - pages) * B


def test_a_prefix_that_a_chat_uses_counts_as_one_of_a_chat() -> None:
    run = CacheRun((None,), [6])
    run.through(ids(1, 2))
    run.through([*ids(1, 2), *ids(5, 1)], retention="chat")
    run.now += 1
    run.through(ids(2, 2))
    make_room(run, 3)
    assert (cached(run, ids(1, 2)), cached(run, ids(2, 2))) == (2 * B, 0)


@pytest.mark.parametrize("retention,seconds", [("rest", REST_S), ("chat", CHAT_S)])
def test_an_unused_prefix_expires_at_its_time(retention: str, seconds: float) -> None:
    run = CacheRun((None,), [10], now=50.0)
    run.through(ids(1, 2, 5), retention=retention)
    assert run.cache.expire(50.0) == pytest.approx(50.0 + seconds)
    run.now = 60.0
    run.through(ids(1, 2, 5), retention=retention)
    due = run.cache.expire(run.now)
    assert due is not None and run.now < due <= 60.0 + seconds
    run.cache.expire(60.0 + seconds - 0.01)
    assert cached(run, ids(1, 2, 5)) >= 2 * B
    due = 60.0 + seconds
    for _ in range(3):
        due = run.cache.expire(due + 1.0) or 0.0
    assert cached(run, ids(1, 2, 5)) == 0 and run.cache.cached_pages == 0
    assert due == 0.0, "nothing is left to wait for"


def test_what_a_lease_holds_does_not_expire() -> None:
    run = CacheRun((None,), [10])
    lease = run.open(ids(1, 3))
    run.feed(lease, 2 * B)
    run.now = 10 * CHAT_S
    run.cache.expire(run.now)
    assert cached(run, ids(1, 3)) == 2 * B
    run.feed(lease, B)
    run.close(lease)


# --- pins ------------------------------------------------------------------------------------------------------------------------


def test_pinned_prompts_neither_expire_nor_give_way() -> None:
    run = CacheRun((None,), [6])
    run.through([*ids(1, 3), *ids(2, 0, 4)], pin=True, prompt_tokens=3 * B + 2)
    assert run.cache.pinned_pages == 3, "the full pages of the prompt"
    run.cache.expire(100 * CHAT_S)
    make_room(run, 3)
    assert cached(run, ids(1, 3)) == 3 * B
    assert run.cache.shortage(3 * B) is None
    assert run.cache.shortage(3 * B + 1) == (4, 3)


def test_prompts_that_share_a_prefix_are_unpinned_apart() -> None:
    run = CacheRun((None,), [12])
    first, second = [*ids(1, 2), *ids(2, 1)], [*ids(1, 2), *ids(3, 2)]
    for prompt in (first, second):
        run.through(prompt, pin=True)
    assert run.cache.pinned_pages == 5
    run.through(first, pin=False)
    assert run.cache.pinned_pages == 4, "the shared pages stay for the other"
    run.through(second, pin=False)
    assert run.cache.pinned_pages == 0
    run.now = REST_S + 10
    run.cache.expire(run.now)
    assert run.cache.cached_pages == 0, "what is no longer pinned expires"


def test_a_pin_holds_also_for_pages_found_in_the_cache() -> None:
    run = CacheRun((None,), [8])
    run.through(ids(1, 3))
    run.through(ids(1, 3), pin=True)
    assert run.cache.pinned_pages == 3
    run.through(ids(1, 3))
    assert run.cache.pinned_pages == 3, "another use without a wish leaves them as they are"


def test_pins_leave_a_full_context() -> None:
    run = CacheRun((None, 20), [10, 10])
    can_pin = run.cache.can_pin
    assert can_pin(4 * B, 6 * B, 0) and not can_pin(4 * B + 1, 6 * B, 0)
    assert can_pin(2 * B, 6 * B, 2) and not can_pin(2 * B, 6 * B, 3)
    run.through(ids(1, 3), pin=True)
    assert can_pin(B, 6 * B, 0) and not can_pin(2 * B, 6 * B, 0)


# --- copies of one page ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(None,), ("latent", None), (None, 500)])
def test_two_identical_prompts_end_with_one_copy(kinds: tuple[Kind, ...]) -> None:
    run = CacheRun(kinds, [20] * len(kinds))
    twins = [run.open(ids(1, 4, 3)) for _ in range(2)]
    for lease in twins:
        run.cache.extend(lease, 4 * B + 3)
    assert run.cache.used_pages == 10 * len(kinds)
    for lease in twins:
        run.feed(lease, 4 * B + 3)
    assert run.cache.used_pages == 6 * len(kinds), "four pages in common, and a last one each"
    assert [pages[:4] for pages in twins[0].pages] == [pages[:4] for pages in twins[1].pages]
    for lease in twins:
        run.close(lease)
    assert run.cache.cached_pages == 5 * len(kinds)


def test_of_tails_that_begin_alike_only_the_longest_stays() -> None:
    run = CacheRun((None,), [20])
    for more in (3, 9, 5):
        run.through(ids(1, 1, more))
    assert run.cache.cached_pages == 2 and cached(run, ids(1, 1, 9)) == B + 9
    run.through(ids(1, 2))
    assert run.cache.cached_pages == 2 and cached(run, ids(1, 2)) == 2 * B


def test_a_copied_page_stays_until_the_copy_is_confirmed() -> None:
    run = CacheRun((None,), [3])
    writer = run.open(ids(1, 0, 10))
    run.feed(writer, 10)
    source = writer.pages[0][0]
    fork = run.open([*ids(1, 0, 8), 5, 6])
    assert fork.hit == 8 and run.cache.begin(fork, 8) == [(0, source, fork.pages[0][0])]
    run.discard(writer)
    assert run.cache.groups[0].owners(source) == 1 and run.cache.begin(fork, 8) == [(0, source, fork.pages[0][0])]
    run.feed(fork, 2)
    assert run.cache.groups[0].owners(source) == 0 and run.cache.begin(fork, 10) == []
    assert run.cache.used_pages == 1


def test_a_copy_that_has_not_been_made_is_no_source() -> None:
    run = CacheRun((None,), [9])
    run.through(ids(1, 0, 10))
    forks = [run.open([*ids(1, 0, 8), 5, 6]) for _ in range(3)]
    sources = {source for lease in forks for _, source, _ in run.cache.begin(lease, 8)}
    targets = {target for lease in forks for _, _, target in run.cache.begin(lease, 8)}
    assert len(sources) == 1 and len(targets) == 3 and not sources & targets


def test_without_a_page_to_copy_to_the_hit_ends_with_the_page_before() -> None:
    run = CacheRun((None,), [2])
    run.through(ids(1, 1, 8))
    assert run.open([*ids(1, 1, 8), 5]).hit == B


def test_a_preempted_lease_that_never_ran_leaves_nothing() -> None:
    run = CacheRun((None, "state"), [8, 4])
    run.through(ids(1, 1, 4))
    before = (run.cache.cached_pages, run.cache.evicted_pages)
    lease = run.open([*ids(1, 1, 4), 5, 6])
    assert lease.hit == B + 4
    run.close(lease, settled=True)
    assert (run.cache.cached_pages, run.cache.evicted_pages) == before and run.cache.used_pages == 0


def test_a_failed_sequence_leaves_nothing_that_it_alone_computed() -> None:
    run = CacheRun((None, 20), [20, 20])
    run.through(ids(1, 2))
    before = run.cache.cached_pages
    lease = run.open([*ids(1, 2), *ids(2, 3)])
    run.feed(lease, 100)
    assert run.cache.probe(Namespace(), [*ids(1, 2), *ids(2, 3)]) > 2 * B
    run.discard(lease)
    assert run.cache.cached_pages == before and cached(run, [*ids(1, 2), *ids(2, 3)]) == 2 * B


@pytest.mark.parametrize("kinds", [(None,), (None, 20), (20,)])
def test_a_failed_sequence_leaves_nothing_that_another_copies_only_the_start_of(kinds: tuple[Kind, ...]) -> None:
    run = CacheRun(kinds, [20] * len(kinds))
    failed = run.open(ids(1, 1, 4))
    run.feed(failed, 10)
    fork = run.open([*ids(1, 0, 10), 5, 6])
    copies = run.cache.begin(fork, 10)
    assert fork.hit == 10 and len(copies) == len(kinds)
    run.feed(failed, B - 10)
    run.discard(failed)
    assert cached(run, ids(1, 1)) == 0, "six tokens of it nobody else computed"
    assert run.cache.begin(fork, 10) == copies and run.cache.used_pages == 2 * len(kinds)
    run.feed(fork, 2)
    assert run.cache.used_pages == len(kinds) and run.cache.cached_pages == 0


# --- windows and states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40])
def test_a_window_group_holds_its_window_and_no_more(window: int) -> None:
    run = CacheRun((None, window), [40, 40], sharing=False)
    lease = run.open(ids(1, 20))
    while run.feed(lease, 1):
        seen = range(max(0, lease.computed - window + 1) // B, -(-lease.computed // B))
        held = [number for number, page in enumerate(lease.pages[1]) if page != NO_PAGE]
        assert held == list(seen)
    assert run.cache.groups[1].owned <= (window - 2) // B + 2


def test_pages_that_leave_a_window_are_the_first_to_go() -> None:
    run = CacheRun((None, 20), [40, 6])
    lease = run.open(ids(1, 12))
    while run.feed(lease, B):
        pass
    assert lease.computed == 12 * B, "a window moves through fewer pages than the sequence has"
    run.close(lease)
    assert cached(run, ids(1, 12)) == 12 * B


def test_a_prefix_is_served_as_far_as_every_window_reaches() -> None:
    run = CacheRun((None, 20), [40, 4])
    run.through(ids(1, 4))
    run.now += 1
    lease = run.open(ids(2, 2))
    run.feed(lease, 100)
    assert cached(run, ids(1, 4)) < 4 * B, "its last window pages were the first to be evicted"
    run.close(lease)
    again = run.open([*ids(1, 4), 1])
    while run.feed(again, 16):
        pass
    assert again.computed == 4 * B + 1
    assert cached(run, ids(1, 4)) == 4 * B, "what was computed again fills the holes"


def test_a_state_is_shared_only_where_a_snapshot_is() -> None:
    run = CacheRun((None, "state"), [40, 8])
    run.through(ids(1, 3, 5))
    assert cached(run, ids(1, 3, 5)) == 3 * B + 5, "where it ended"
    assert cached(run, ids(1, 3, 4)) == 3 * B, "the last page end of the prompt"
    assert cached(run, ids(1, 2, 4)) == 0
    run.close(unsettled := run.open([*ids(2, 3), 1]), settled=False)
    assert unsettled.hit == 0 and cached(run, ids(2, 3)) == 0


def test_the_live_state_of_a_sequence_with_a_step_in_flight_is_not_kept() -> None:
    run = CacheRun(("state",), [6])
    for settled, kept in ((False, B), (True, B + 5)):
        lease = run.open(ids(1 + settled, 1, 5))
        while run.feed(lease, 100):
            pass
        run.close(lease, settled=settled)
        assert cached(run, ids(1 + settled, 1, 5)) == kept


def test_one_state_page_is_enough_for_one_sequence_after_another() -> None:
    run = CacheRun((None, "state"), [20, 1])
    for _ in range(3):
        assert run.through(ids(1, 3, 5)) == 0, "there is no page to copy the state to"


# --- keys ------------------------------------------------------------------------------------------------------------------------


def test_every_part_of_the_namespace_keeps_prefixes_apart() -> None:
    run = CacheRun((None,), [40])
    names = [Namespace(), Namespace(model="m"), Namespace(format="m"), Namespace(adapter="m"), Namespace(salt="m")]
    for name in names:
        assert run.cache.probe(name, ids(1, 3)) == 0
        assert run.through(ids(1, 3), namespace=name) == 0
        assert run.cache.probe(name, ids(1, 3)) == 3 * B - 1


def test_without_sharing_nothing_is_found_and_nothing_kept() -> None:
    run = CacheRun((None, "state"), [20, 4], sharing=False)
    for _ in range(2):
        assert run.through(ids(1, 3)) == 0
    assert run.cache.cached_pages == 0 and run.cache.probe(Namespace(), ids(1, 3)) == 0


def test_a_collision_of_hashes_gives_nobody_anothers_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """S28: with hashes of 4 bits, 60 prompts are found as what they are, and every page that is read is checked."""
    weaken(monkeypatch)
    run = CacheRun((None, 40), [400, 400])
    prompts = [[*ids(1, 1), *(n % 7 for n in range(kind)), *ids(kind, 1, kind % B)] for kind in range(60)]
    for prompt in prompts:
        run.through(prompt)
    for prompt in prompts:
        assert cached(run, prompt) == len(prompt)
        lease = run.open([*prompt, 999_999])
        run.feed(lease, 1)
        run.close(lease)


# --- accounts --------------------------------------------------------------------------------------------------------------------


def test_growing_adds_free_pages_and_touches_none_in_use() -> None:
    run = CacheRun((None, 20), [4, 4])
    run.through(ids(1, 3))
    held = run.cache.held()
    run.cache.grow([9, 6])
    run.check()
    assert run.cache.held() == held and run.cache.total_pages == 15
    assert cached(run, ids(1, 3)) == 3 * B


def test_filled_counts_the_slots_of_owned_and_cached_pages() -> None:
    run = CacheRun((None,), [20])
    run.through(ids(1, 1, 4))
    assert run.cache.filled() == (B + 4, 2 * B)
    lease = run.open(ids(2, 3))
    run.cache.extend(lease, 3 * B)
    run.feed(lease, B + 5)
    assert run.cache.filled() == (B + 4 + B + 5, 5 * B)


@pytest.mark.parametrize("wrong", ["a lease is missing", "a page is another", "a page is free", "a key is another"])
def test_check_finds_what_is_wrong(wrong: str) -> None:
    run = CacheRun((None,), [10])
    run.through(ids(1, 2))
    lease = run.open(ids(2, 2))
    run.feed(lease, 20)
    leases = [lease]
    if wrong == "a lease is missing":
        leases = []
    elif wrong == "a page is another":
        lease.pages[0][0], lease.pages[0][1] = lease.pages[0][1], lease.pages[0][0]
    elif wrong == "a page is free":
        run.cache.groups[0].disown(lease.pages[0][1])
    else:
        lease.tokens[0] += 1
    with pytest.raises(AssertionError):
        run.cache.check(leases)
