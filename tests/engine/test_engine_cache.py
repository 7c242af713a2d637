"""The engine and its prefix cache, without a model: hits, merges, forks, pins, expiry, growth, and what failures leave behind."""

from __future__ import annotations

import itertools
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.built import EngineOptions
from engine.errors import ContextLengthExceeded, OutOfMemory
from engine.runtime.batch import PAGE_TOKENS, StepInputs
from engine.scheduler.scheduler import Scheduler
from engine.types import EngineRequest, SamplingParams
from tests.fixtures.engine_run import Run
from tests.fixtures.scripted_executor import Kind

LAYOUTS: list[tuple[Kind, ...]] = [(None,), (None, 20), (20,), ("latent",)]
WITH_STATE: list[tuple[Kind, ...]] = [("state",), (None, "state"), (20, "state")]


def _request(number: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> EngineRequest:
    return EngineRequest(id=number, prompt=prompt, max_tokens=max_tokens, **fields)  # pyright: ignore[reportArgumentType]


# --- hits ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", LAYOUTS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 60])
def test_the_same_prompt_again_leaves_one_token_to_compute(windows: tuple[Kind, ...], length: int) -> None:
    run = Run(windows=windows)
    cold, warm = (_request(number, list(range(length))) for number in (0, 1))
    run.add(cold)
    run.finish()
    before = run.paged.written
    run.add(warm)
    run.finish().right(warm)
    assert (run.cached(cold), run.cached(warm)) == (0, length - 1)
    assert run.paged.written - before == 8, "one of the prompt, and seven draws fed back"
    assert run.engine.stats.hit_tokens == length - 1


@pytest.mark.parametrize("windows", LAYOUTS)
@pytest.mark.parametrize("same", [1, 15, 16, 17, 40, 47])
def test_a_prefix_is_shared_to_the_token(windows: tuple[Kind, ...], same: int) -> None:
    run = Run(windows=windows)
    run.add(_request(0, list(range(48))))
    run.finish()
    run.add(other := _request(1, [*range(same), *range(900, 960)]))
    run.finish().right(other)
    assert run.cached(other) == same


@pytest.mark.parametrize("windows", [*LAYOUTS, *WITH_STATE])
def test_the_next_turn_of_a_chat_starts_where_the_last_one_ended(windows: tuple[Kind, ...]) -> None:
    run = Run(windows=windows)
    run.add(first := _request(0, list(range(37)), 9, retention="chat"))
    run.finish()
    turn = [*first.prompt, *run.tokens[0, 0], 5, 6, 7]
    run.add(second := _request(1, turn, retention="chat"))
    run.finish().right(second)
    assert run.cached(second) == len(first.prompt) + 9 - 1, "the last token drawn was never fed back"


@pytest.mark.parametrize("windows", WITH_STATE)
def test_a_state_is_found_at_the_prompts_last_page_end_and_where_prompts_part(windows: tuple[Kind, ...]) -> None:
    run = Run(windows=windows, context=1024)
    prompts = [[*range(100), *range(1000 * n, 1000 * n + 30)] for n in range(1, 5)]
    requests = [_request(number, prompt) for number, prompt in enumerate(prompts)]
    for request in requests:
        run.add(request)
        run.finish().right(request)
    run.add(again := _request(9, prompts[3]))
    run.finish().right(again)
    assert run.cached(again) == 128, "the last page end before the prompt's end"
    assert run.cached(requests[1]) == 0
    assert run.cached(requests[3]) == 96, "the page end where the second and the third left the first"


def test_a_running_request_is_a_source_too() -> None:
    run = Run()
    run.add(first := _request(0, list(range(40)), 30))
    for _ in range(5):
        run.step()
    run.add(second := _request(1, [*range(40), *run.tokens[0, 0][:3], 7]))
    run.finish().right(second)
    run.right(first)
    assert run.cached(second) == 43


def test_hits_need_the_same_salt_adapter_and_nothing_else() -> None:
    """B44: sampling does not split the cache."""
    run, prompt = Run(), list(range(50))
    run.add(_request(0, prompt))
    run.finish()
    others = {
        "salt": _request(1, prompt, salt="a"),
        "adapter": _request(2, prompt, adapter="sha256:1"),
        "adapter again, other weights": _request(3, prompt, adapter="sha256:2"),
    }
    for request in others.values():
        run.add(request)
        run.finish()
        assert run.cached(request) == 0
    same = [
        _request(4, prompt, sampling=SamplingParams(temperature=0.3, top_k=4, seed=9)),
        _request(5, prompt, priority="high", client="else"),
        _request(6, prompt, salt="a"),
        _request(7, prompt, adapter="sha256:2"),
    ]
    for request in same:
        run.add(request)
        run.finish().right(request)
        assert run.cached(request) == 49


def test_without_sharing_nothing_is_found_and_nothing_stays() -> None:
    run = Run(options=EngineOptions(prefix_cache=False))
    for number in range(3):
        run.add(request := _request(number, list(range(40))))
        run.finish().right(request)
        assert run.cached(request) == 0
    assert run.engine.stats.pages_cached == 0


# --- merges and forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", LAYOUTS[:2])
def test_identical_prompts_computed_in_the_same_step_end_with_one_copy(
    windows: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "_follows", lambda self, sequence, now: False)
    run = Run(windows=windows, budget=1000)
    requests = [_request(number, list(range(64)), 40) for number in range(2)]
    run.add(*requests)
    run.step()
    assert run.paged.written == 128
    groups = len(windows)
    assert run.engine.stats.pages_used == (4 if groups == 1 else 4 + 2), "of the window, what it still shows"
    for _ in range(32):
        run.step()
    assert run.engine.stats.pages_used <= 6 + 2 * groups, "what they wrote alike is one copy too, but for the last page of each"
    run.finish()
    for request in requests:
        run.right(request)


def test_identical_prompts_that_come_together_are_computed_once() -> None:
    run = Run(budget=1000)
    requests = [_request(number, list(range(64)), 20) for number in range(4)]
    run.add(*requests)
    run.step()
    run.step()
    assert run.paged.written == 64 + 1 + 3, "each of the others computes its last token"
    run.finish()
    for request in requests:
        run.right(request)


def test_samples_of_one_prompt_share_its_pages() -> None:
    run = Run(budget=1000, pages=40)
    run.add(request := _request(0, list(range(100)), 12, n=8))
    run.step()
    run.step()
    assert run.paged.written == 100 + 1 + 7
    assert run.engine.stats.pages_used == 6 + 8, "six full pages are one copy, the seventh is each one's own"
    run.finish()
    for choice in range(8):
        run.right(request, choice=choice)
    assert [run.cached(request, choice) for choice in range(8)] == [0] + [99] * 7


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=2, max_size=10),
    layout=st.sampled_from([*LAYOUTS, *WITH_STATE]),
    pages=st.integers(7, 30),
    budget=st.sampled_from([5, 16, 64]),
    depth=st.sampled_from([1, 2]),
    ahead=st.integers(1, 4),
    choices=st.integers(1, 3),
)
def test_warm_and_cold_give_the_same_tokens(
    lengths: list[tuple[int, int]], layout: tuple[Kind, ...], pages: int, budget: int, depth: int, ahead: int, choices: int
) -> None:
    """Prompts that are prefixes of each other or branch, forked, through a pool that evicts and preempts all the while."""
    run = Run(windows=layout, pages=pages, budget=budget, depth=depth)
    requests = [
        _request(i, [0] * 20 * (kind // 2) + [kind % 2 + t % 7 for t in range(length)], 12, n=choices)
        for i, (kind, length) in enumerate(lengths)
    ]
    requests = [r for r in requests if len(r.prompt) + 12 <= pages * PAGE_TOKENS]
    waiting = list(requests)
    while waiting or run.engine.has_work:
        for request in waiting[:ahead]:
            run.add(request)
        del waiting[:ahead]
        for _ in range(7):
            if run.engine.has_work:
                run.step()
    for request, choice in itertools.product(requests, range(choices)):
        run.right(request, choice=choice)


# --- how long, how much ----------------------------------------------------------------------------------------------------------


def test_prefixes_go_by_class_and_age_when_nobody_needs_the_space() -> None:
    run = Run()
    run.add(
        _request(0, list(range(40))),
        _request(1, list(range(100, 140)), retention="chat"),
        _request(2, list(range(200, 240)), pin=True),
    )
    run.finish()
    ended, found = run.clock.now, []
    for minutes in (4, 6, 29, 31, 600):
        run.clock.now = ended + 60 * minutes
        run.engine.tick(run.clock.now)
        run.engine.check()
        stats = run.engine.stats
        found.append((stats.pages_cached, stats.pages_pinned))
    assert found[0][0] > found[1][0] > 0 and found[1] == found[2]
    assert found[3] == found[4] == (0, 2), "the full pages of the pinned prompt stay for ever"


def test_tick_says_when_it_wants_to_be_called_again() -> None:
    run = Run(options=EngineOptions(accounting_interval_s=1.0))
    assert run.engine.tick(0.0) is None
    run.add(_request(0, list(range(40))))
    run.finish()
    run.engine.tick(run.clock.now)
    wait = run.engine.tick(run.clock.now)
    assert wait is not None and 290 < wait <= 300
    run.clock.now += wait + 0.001
    run.engine.tick(run.clock.now)
    assert run.engine.stats.pages_cached == 0 and run.engine.tick(run.clock.now) is None


def test_under_pressure_the_rest_goes_before_chats_and_pinned_prompts_never() -> None:
    run = Run(pages=12, context=128)
    run.add(_request(0, list(range(33)), 1, pin=True))
    run.finish()
    run.add(_request(1, list(range(100, 133)), 1, retention="chat"))
    run.finish()
    run.add(_request(2, list(range(200, 233)), 1))
    run.finish()
    run.add(_request(3, list(range(300, 370)), 10))
    run.finish()
    probes = [_request(10 + n, [*range(100 * n, 100 * n + 33), 9], 1) for n in range(3)]
    for probe in probes:
        run.add(probe)
        run.finish()
    assert run.cached(probes[0]) >= 32 and run.cached(probes[1]) >= 32 and run.cached(probes[2]) < 32


def test_a_pin_is_refused_when_it_would_not_leave_one_context_and_can_be_taken_back() -> None:
    run = Run(pages=12, context=128)
    run.add(_request(0, list(range(64)), 1, pin=True))
    run.finish()
    with pytest.raises(OutOfMemory) as caught:
        run.engine.add(_request(1, list(range(500, 532)), 1, pin=True))
    assert "128" in caught.value.message and "2" in caught.value.message
    run.add(_request(2, list(range(64)), 1, pin=False))
    run.finish()
    assert run.engine.stats.pages_pinned == 0
    run.add(again := _request(3, list(range(500, 532)), 1, pin=True))
    run.finish().right(again)
    assert run.engine.stats.pages_pinned == 2


def test_a_full_context_still_fits_beside_all_that_is_pinned() -> None:
    run = Run(pages=12, context=128)
    run.add(_request(0, list(range(64)), 1, pin=True))
    run.finish()
    run.add(whole := _request(1, list(range(500, 600)), 28))
    run.finish().right(whole)
    assert run.engine.stats.pages_pinned == 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [*LAYOUTS, *WITH_STATE])
def test_growth_in_the_middle_of_everything(windows: tuple[Kind, ...], depth: int) -> None:
    run = Run(windows=windows, pages=6, context=96, depth=depth)
    requests = [_request(n, list(range(100 * n, 100 * n + 30)), 20) for n in range(3)]
    run.add(*requests)
    for _ in range(9):
        run.step()
    long = _request(9, list(range(900, 1100)), 20)
    with pytest.raises(ContextLengthExceeded):
        run.engine.add(long)
    run.engine.grow(256, [40] * len(windows))
    run.engine.check()
    run.add(long)
    run.finish()
    for request in [*requests, long]:
        run.right(request)
    assert run.engine.stats.pages_total == 40 * len(windows)


# --- failures --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [*LAYOUTS, *WITH_STATE])
def test_a_step_that_fails_once_at_any_point_leaves_the_cache_right(windows: tuple[Kind, ...], depth: int) -> None:
    prompt = [*range(40)]
    for at in range(1, 30, 2):

        def fault(inputs: StepInputs, at: int = at) -> str | None:
            return "once" if inputs.step == at else None

        run = Run(windows=windows, depth=depth, pages=12, budget=16, fault=fault)
        requests = [_request(n, [*prompt[: 40 - 9 * n], *range(100 * n, 100 * n + 5)], 10) for n in range(3)]
        for request in requests:
            run.add(request)
            run.step()
            run.step()
        run.finish()
        for request in requests:
            run.right(request)


def test_what_a_failed_request_alone_computed_is_not_kept() -> None:
    run = Run(fault=lambda inputs: "poison" if any(1666 in row.tokens for row in inputs.rows) else None, budget=16)
    run.add(_request(0, list(range(33)), 1))
    run.finish()
    cached = run.engine.stats.pages_cached
    run.add(_request(1, [*range(32), *range(1600, 1700)], 4))
    run.finish()
    assert run.ends[1, 0].finish == "error"
    assert run.engine.stats.pages_cached == cached, "the prefix of the first is as it was, and nothing else is there"


def test_wrong_accounts_are_counted_and_logged_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.add(request := _request(0, list(range(40))))
    run.step()
    run.engine._cache.groups[0]._free.append(0)
    run.clock.now += 2
    run.engine.tick(run.clock.now)
    assert run.engine.stats.accounting_errors == 1
    assert "accounts" in caplog.text
    run.engine._cache.groups[0]._free.remove(0)
    run.finish().right(request)


def test_requests_are_announced_before_their_first_step_and_once() -> None:
    run, seen = Run(budget=16), []
    run.engine.on_scheduled = lambda requests: seen.append((requests, len(run.executor.steps)))
    run.add(*(_request(n, list(range(100 * n, 100 * n + 10)), 5, n=2) for n in range(3)))
    run.finish()
    assert sorted(chain(*(requests for requests, _ in seen))) == [0, 1, 2]
    assert seen[0][1] == 0, "before the executor had any step"
