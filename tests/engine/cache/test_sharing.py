"""What is shared and what is copied, to the token and to the page of every group; and when exactly it goes."""

from __future__ import annotations

import itertools

import pytest

from engine.cache.radix import Namespace
from tests.engine.cache.cache_run import CacheRun
from tests.engine.cache.cache_scenes import B, cached, ids, make_room
from tests.fixtures.scripted_executor import Kind

REST_S, CHAT_S = 300.0, 1800.0


def counts(run: CacheRun) -> list[tuple[int, int]]:
    """Of each group, pages that leases own and pages that only the cache keeps."""
    return [(group.owned, group.cached) for group in run.cache.groups]


# --- copies, to the token --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", range(B, 2 * B + 1))
@pytest.mark.parametrize("source", ["tail", "full page", "running"])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_a_prompt_that_parts_in_the_middle_of_a_page_copies_what_is_alike(window: int | None, source: str, same: int) -> None:
    """The memory checks that the sequence goes on from its own history."""
    run = CacheRun((None, window), [20, 20])
    tokens = ids(1, 3 if source == "full page" else 1, 0 if source == "full page" else B - 2)
    if source == "running":
        lease = run.open(tokens)
        assert run.feed(lease, 100) == len(tokens)
    else:
        run.through(tokens)
    fork = run.open([*tokens[:same], 5, 6, 7])
    assert fork.hit == min(same, len(tokens))
    copied = [group for group, _, _ in run.cache.begin(fork, fork.hit)]
    assert copied == ([] if fork.hit % B == 0 else [0, 1])
    while run.feed(fork, 2):
        pass
    assert fork.computed == len(fork.tokens)
    assert cached(run, tokens) == len(tokens) and cached(run, fork.tokens) == len(fork.tokens)


def test_the_best_of_several_sources_is_copied() -> None:
    run = CacheRun((None,), [40])
    for alike in (3, 11, 7):
        run.through([*ids(1, 1, alike), *ids(2 + alike, 0, B - alike)])
    runner = run.open([*ids(1, 1, 13), 4])
    run.feed(runner, 100)
    fork = run.open([*ids(1, 2), 5])
    assert fork.hit == B + 13
    assert run.cache.begin(fork, fork.hit) == [(0, runner.pages[0][1], fork.pages[0][1])]
    run.discard(runner)
    assert cached(run, ids(1, 2)) == B + 11


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 3 * B])
@pytest.mark.parametrize("kinds", [(None,), (None, 1), (20,)])
def test_of_a_prompt_that_is_there_whole_one_token_is_left_to_compute(kinds: tuple[Kind, ...], length: int) -> None:
    run = CacheRun(kinds, [20] * len(kinds))
    assert [run.through(ids(1, 0, length)) for _ in range(3)] == [0, length - 1, length - 1]


@pytest.mark.parametrize("kinds", [(None,), (None, 20), (None, "state"), ("state",)])
@pytest.mark.parametrize("answer", [1, 12, 13, 40])
def test_the_next_turn_of_a_chat_starts_where_the_last_one_ended(kinds: tuple[Kind, ...], answer: int) -> None:
    run = CacheRun(kinds, [40] * len(kinds))
    tokens: list[int] = []
    for turn in range(4):
        before = len(tokens)
        tokens = [*tokens, *ids(1 + turn, 0, 5 + 9 * turn)]
        lease = run.open(tokens, retention="chat", prompt_tokens=len(tokens))
        assert lease.hit == before, "the answer was computed already"
        for drawn in [*ids(50 + turn, 0, answer), None]:
            while run.feed(lease, 100):
                pass
            if drawn is not None:
                lease.tokens.append(drawn)
        run.close(lease)
        run.now += 60
        run.cache.expire(run.now)


def test_a_probe_changes_nothing() -> None:
    run = CacheRun((None, 20, "state"), [20, 20, 8])
    run.through(ids(1, 3, 5))
    run.now = 100.0
    before = (counts(run), run.cache.held(), run.cache.filled(), run.cache.expire(0.0), len(run.cache._tree._roots))
    for more in range(3 * B + 6):
        run.cache.probe(Namespace(), [*ids(1, 0, more), 5])
        run.cache.can_start(Namespace(), [*ids(1, 0, more), 5], 3)
        run.cache.probe(Namespace(salt="unknown"), ids(1, 1))
    run.check()
    assert before == (counts(run), run.cache.held(), run.cache.filled(), run.cache.expire(0.0), len(run.cache._tree._roots))
    run.cache.expire(REST_S)
    assert cached(run, ids(1, 3, 5)) == 0, "a probe is no use"


# --- twins -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 100])
def test_twins_in_step_end_with_one_copy_in_every_group(chunk: int) -> None:
    """A full group, one with a window of 20 tokens (at 67: pages 3 and 4), and a state with a snapshot at the last page end."""
    run = CacheRun((None, 20, "state"), [40, 40, 12])
    twins = [run.open(ids(1, 4, 3)) for _ in range(3)]
    while sum(run.feed(lease, chunk) for lease in twins):
        pass
    assert counts(run) == [(4 + 3, 0), (1 + 3, 3), (3, 1)]
    for lease in twins:
        run.close(lease)
    assert counts(run) == [(0, 5), (0, 5), (0, 2)], "of the state: the snapshot, and the end of the first that ended"
    assert cached(run, ids(1, 4, 3)) == 4 * B + 3


def test_twins_that_part_keep_what_they_have_in_common_once() -> None:
    run = CacheRun((None, 500), [40, 40])
    twins = [run.open([*ids(1, 2), *ids(kind, 2)]) for kind in (2, 3)]
    for lease in twins:
        run.cache.extend(lease, 4 * B)
    for lease in twins:
        run.feed(lease, 100)
    assert counts(run) == [(6, 0)] * 2
    run.discard(twins[0])
    assert counts(run) == [(4, 0)] * 2 and cached(run, [*ids(1, 2), *ids(2, 2)]) == 2 * B


# --- holes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", range(6))
@pytest.mark.parametrize("window", [2, 16, 17, 20, 40])
def test_a_hole_makes_a_hit_shorter_or_leaves_it_but_never_wrong(window: int, hole: int) -> None:
    """One page of the window group is gone: hits are the lengths whose window does not touch it."""
    run = CacheRun((None, window), [40, 40])
    run.through(ids(1, 6))
    node = next(node for node in run.cache._tree.nodes() if node.depth == hole + 1)
    run.cache._eviction.drop(node, 1)
    run.check()
    for length in range(1, 6 * B + 1):
        usable = [n for n in range(length + 1) if _sees(n, window).isdisjoint(range(hole * B, hole * B + B))]
        assert cached(run, ids(1, 0, length)) == max(usable)
        lease = run.open([*ids(1, 0, length), 5])
        assert lease.hit == max(usable)
        run.feed(lease, 1)
        run.discard(lease)


def _sees(position: int, window: int) -> set[int]:
    """Earlier positions that a query at `position` looks at."""
    return set(range(max(0, position - window + 1), position))


# --- when it goes ----------------------------------------------------------------------------------------------------------------


def test_everything_goes_at_its_very_second_and_not_before() -> None:
    run = CacheRun((None, 20), [40, 40])
    run.now = 10.0
    run.through(ids(1, 2))
    run.now = 20.0
    run.through(ids(2, 2), retention="chat")
    run.now = 30.0
    run.through(ids(3, 2))
    expire = run.cache.expire

    def left() -> list[int]:
        return [cached(run, ids(kind, 2)) // B for kind in (1, 2, 3)]

    assert expire(30.0) == 10.0 + REST_S
    assert expire(10.0 + REST_S - 0.001) == 10.0 + REST_S and left() == [2, 2, 2]
    assert expire(10.0 + REST_S) == 30.0 + REST_S and left() == [0, 2, 2]
    assert expire(30.0 + REST_S) == 20.0 + CHAT_S and left() == [0, 2, 0]
    assert expire(20.0 + CHAT_S - 0.001) == 20.0 + CHAT_S and left() == [0, 2, 0]
    assert expire(20.0 + CHAT_S) is None and run.cache.held() == [[], []]


def test_a_prefix_that_is_used_again_gets_its_time_again_and_what_hangs_below_does_not() -> None:
    run = CacheRun((None,), [40])
    run.through(ids(1, 4))
    run.now = 200.0
    run.through([*ids(1, 2), 5])
    assert run.cache.expire(REST_S) == 200.0 + REST_S
    assert cached(run, ids(1, 4)) == 2 * B
    assert run.cache.expire(200.0 + REST_S) is None


def test_the_time_starts_when_the_last_sequence_ends() -> None:
    run = CacheRun((None,), [40])
    leases = [run.open(ids(1, 2)) for _ in range(2)]
    for run.now, lease in zip((400.0, 1000.0), leases, strict=True):
        run.feed(lease, 100)
        run.close(lease)
    assert run.cache.expire(1000.0) == 1000.0 + REST_S


def test_pins_do_not_wait_for_a_time() -> None:
    run = CacheRun((None, 20), [40, 40])
    run.through(ids(1, 3), pin=True)
    assert run.cache.expire(0.0) is None and run.cache.expire(1e9) is None
    assert cached(run, ids(1, 3)) == 3 * B


def test_a_pinned_prompt_that_begins_with_another_outlives_it() -> None:
    run = CacheRun((None,), [20])
    for pages in (2, 4):
        run.through(ids(1, pages), pin=True)
    run.through(ids(1, 2), pin=False)
    assert run.cache.pinned_pages == 4, "the longer one needs all of the shorter"
    run.through(ids(1, 4), pin=False)
    assert run.cache.pinned_pages == 0


def test_under_full_pressure_only_pinned_pages_and_those_in_use_stay() -> None:
    run = CacheRun((None, 20), [12, 11])
    run.through(ids(1, 3), pin=True)
    lease = run.open(ids(2, 2, 3))
    run.feed(lease, 100)
    for kind, retention in itertools.product((3, 4, 5), ("chat", "rest")):
        run.through(ids(kind, 1), retention=retention)
    make_room(run, 6)
    assert [group.cached for group in run.cache.groups] == [0, 0] and [group.pinned for group in run.cache.groups] == [3, 3]
    assert cached(run, ids(1, 3)) == 3 * B and cached(run, ids(2, 2, 3)) == 2 * B + 3
