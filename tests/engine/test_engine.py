"""The step loop without a model: stop rules, accounts, batches, aborts at every step, pages running out, depth 2.

The executor draws a hash of every cached token it sees (PagedExecutor), so tokens are right only when paging, chunking and
preemption are; the expected ones are computed from the prompt alone. Faults are in test_engine_faults.py.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.errors import CavectlError, ContextLengthExceeded, InvalidRequest, OutOfMemory
from engine.types import EngineRequest, SamplingParams
from tests.fixtures.engine_run import Run, numbered_requests
from tests.fixtures.scripted_executor import Kind, PagedExecutor, ScriptedExecutor, layout_of

# --- one request -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_exactly_so_many_tokens_as_asked(max_tokens: int) -> None:
    run = Run()
    run.add(request := EngineRequest(id=5, prompt=[1, 2, 3], max_tokens=max_tokens))
    run.finish().right(request)
    end = run.ends[5, 0]
    assert end.finish == "length" and end.stop_id is None
    assert end.usage is not None and (end.usage.prompt_tokens, end.usage.output_tokens) == (3, max_tokens)


def test_the_context_ends_a_sequence() -> None:
    run = Run(context=64)
    run.add(request := EngineRequest(id=1, prompt=list(range(60)), max_tokens=50))
    run.finish().right(request, 4)
    assert run.ends[1, 0].finish == "length"


def test_a_stop_id_ends_it_and_is_the_last_token() -> None:
    run = Run(executor=ScriptedExecutor([7, 8, 9, 2, 11]))
    run.add(EngineRequest(id=1, prompt=[1], max_tokens=50, stop_ids=[2, 3]))
    run.finish()
    assert run.tokens[1, 0] == [7, 8, 9, 2]
    assert (run.ends[1, 0].finish, run.ends[1, 0].stop_id) == ("stop", 2)


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    run = Run(executor=ScriptedExecutor([7, 2]))
    run.add(EngineRequest(id=1, prompt=[1], max_tokens=2, stop_ids=[2]))
    run.finish()
    assert run.ends[1, 0].finish == "stop"


def test_min_tokens_is_counted_before_a_stop_id_counts() -> None:
    run = Run(executor=ScriptedExecutor([2, 2, 2, 5]))
    run.add(EngineRequest(id=1, prompt=[1], max_tokens=9, stop_ids=[2], min_tokens=2))
    run.finish()
    assert run.tokens[1, 0] == [2, 2, 2]


def test_choices_are_sequences_of_their_own() -> None:
    run = Run()
    run.add(request := EngineRequest(id=1, prompt=[4, 5, 6], max_tokens=12, n=3, sampling=SamplingParams(seed=9)))
    run.finish()
    for choice in range(3):
        run.right(request, choice=choice)
    assert len({tuple(tokens) for tokens in run.tokens.values()}) == 3


def test_times_are_of_the_clock_and_add_up() -> None:
    clock = itertools.count()
    layout = layout_of(None)
    engine = Engine(PagedExecutor(layout), layout, [9], context_tokens=64, clock=lambda: float(next(clock)))
    engine.add(EngineRequest(id=1, prompt=[1], max_tokens=3), arrived=-100.0)
    outputs = [output for _ in range(3) for output in engine.step().outputs]  # pyright: ignore[reportOptionalMemberAccess]
    usage = outputs[-1].usage
    assert usage is not None
    assert usage.queue_ms > 100_000 and usage.prefill_ms > 0 and usage.decode_ms > 0
    assert usage.queue_ms + usage.prefill_ms + usage.decode_ms < (100 + next(clock)) * 1000


# --- refused at the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (EngineRequest(id=1, prompt=[], max_tokens=1), InvalidRequest, ["no tokens"]),
        (EngineRequest(id=1, prompt=[1, -1], max_tokens=1), InvalidRequest, ["negative"]),
        (EngineRequest(id=1, prompt=[1, 1 << 31], max_tokens=1), InvalidRequest, ["2^31"]),
        (EngineRequest(id=1, prompt=[1], max_tokens=0), InvalidRequest, ["at least 1"]),
        (EngineRequest(id=1, prompt=[1], max_tokens=1, n=0), InvalidRequest, ["at least 1"]),
        (EngineRequest(id=1, prompt=[1] * 64, max_tokens=1), ContextLengthExceeded, ["64", "64"]),
        (EngineRequest(id=1, prompt=[1] * 900, max_tokens=1), ContextLengthExceeded, ["900", "64"]),
        (EngineRequest(id=1, prompt=[1] * 40, max_tokens=10), OutOfMemory, ["4 cache pages", "there are 3"]),
    ],
)
def test_what_can_never_run_is_refused_with_both_numbers(
    request_: EngineRequest, error: type[CavectlError], says: list[str]
) -> None:
    run = Run(pages=3, context=64)
    with pytest.raises(error) as caught:
        run.engine.add(request_)
    assert all(text in caught.value.message for text in says)
    assert not run.engine.has_work


def test_what_just_fits_runs() -> None:
    run = Run(pages=3, context=64)
    run.add(request := EngineRequest(id=1, prompt=[1] * 40, max_tokens=9))
    run.finish().right(request)


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    run = Run()
    run.add(request := EngineRequest(id=1, prompt=[1], max_tokens=5))
    with pytest.raises(InvalidRequest):
        run.engine.add(request)
    run.finish().right(request)


def test_a_refusal_is_reported_for_every_choice() -> None:
    run = Run()
    request = EngineRequest(id=1, prompt=[], max_tokens=5, n=2)
    run.engine.refuse(request, InvalidRequest("no").info)
    run.step()
    assert {key: (end.finish, end.error) for key, end in run.ends.items()} == {
        (1, choice): ("error", InvalidRequest("no").info) for choice in (0, 1)
    }
    assert not run.engine.has_work


# --- batches ---------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    budget=st.sampled_from([1, 7, 16, 1000]),
    pages=st.integers(8, 40),
    windows=st.sampled_from([(None,), (20,), (None, 20), (None, 1, 33), ("state",), (None, "state"), ("latent", None)]),
    depth=st.sampled_from([1, 2]),
    ranks=st.booleans(),
    shared=st.booleans(),
    arrivals=st.lists(st.integers(0, 12), min_size=6, max_size=6),
)
def test_the_tokens_of_a_request_do_not_depend_on_anything_else(
    prompts: list[int],
    budget: int,
    pages: int,
    windows: tuple[Kind, ...],
    depth: int,
    ranks: bool,
    shared: bool,
    arrivals: list[int],
) -> None:
    """Neither on neighbours, chunks, pages, steps in flight nor ranks, nor on what others left in the cache."""
    run = Run(windows=windows, pages=pages, depth=depth, budget=budget, ranks=ranks)
    starts = [0 if shared else i for i in range(len(prompts))]
    requests = [
        EngineRequest(id=i, prompt=[(start + t) % 11 for t in range(n)], max_tokens=25, sampling=SamplingParams(seed=i))
        for i, (start, n) in enumerate(zip(starts, prompts, strict=True))
    ]
    due = sorted(zip(arrivals, requests, strict=False), key=lambda pair: pair[0])
    for step in itertools.count():
        while due and due[0][0] <= step:
            run.add(due.pop(0)[1])
        if run.engine.has_work:
            run.step()
        elif not due:
            break
    for request in requests:
        run.right(request)


def test_no_step_has_more_tokens_than_the_budget() -> None:
    run = Run(budget=7)
    run.add(*numbered_requests(12, prompt=9, max_tokens=9))
    run.finish()
    assert max(sum(len(row.tokens) for row in inputs.rows) for inputs in run.executor.steps) == 7


def test_requests_share_steps() -> None:
    run = Run()
    run.add(*numbered_requests(8, prompt=3, max_tokens=10))
    run.finish()
    assert max(len(inputs.rows) for inputs in run.executor.steps) == 8
    assert len(run.executor.steps) < 20


def test_a_long_prompt_does_not_stop_a_running_stream() -> None:
    run = Run(budget=16)
    run.add(first := EngineRequest(id=0, prompt=[1], max_tokens=40))
    run.step()
    run.add(EngineRequest(id=1, prompt=[2] * 300, max_tokens=2))
    for count in range(2, 20):
        run.step()
        assert len(run.tokens[0, 0]) == count
    run.finish().right(first)


@pytest.mark.parametrize("depth", [1, 2])
def test_six_pages_and_four_long_requests_end_as_in_a_big_pool(depth: int) -> None:
    small, big = Run(pages=6, depth=depth), Run(pages=100, depth=depth)
    requests = [EngineRequest(id=i, prompt=[i] * 20, max_tokens=70, n=2, sampling=SamplingParams(seed=i)) for i in range(4)]
    for run in (small, big):
        run.add(*requests)
        run.finish()
    assert small.tokens == big.tokens
    for request in requests:
        for choice in (0, 1):
            small.right(request, choice=choice)
    reopened = sum(len(inputs.opened) for inputs in small.executor.steps)
    assert reopened > 8, "nothing was preempted, the test shows nothing"


# --- aborts ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_at_every_step_frees_everything_and_harms_nobody(depth: int) -> None:
    requests = numbered_requests(3, prompt=20, max_tokens=12)
    for at, victim in itertools.product(range(18), range(3)):
        run = Run(pages=8, depth=depth, budget=16)
        run.add(*requests)
        for _ in range(at):
            if run.engine.has_work:
                run.step()
        before = list(run.tokens.get((victim, 0), []))
        run.engine.abort(victim)
        run.engine.check()
        run.finish()
        if run.ends[victim, 0].finish == "abort":
            assert run.tokens.get((victim, 0), []) == before, "a token after the abort"
        for request in requests:
            if request.id != victim:
                run.right(request)


def test_the_pages_of_an_aborted_request_are_free_before_the_next_step() -> None:
    run = Run(pages=4)
    run.add(EngineRequest(id=1, prompt=[1] * 30, max_tokens=30))
    run.step()
    assert run.engine.stats.pages_used == 2
    run.engine.abort(1)
    run.engine.check()
    run.add(request := EngineRequest(id=2, prompt=[2] * 60, max_tokens=4))
    run.step()
    assert run.engine.stats.pages_used == 4
    run.finish().right(request)


def test_one_choice_can_be_aborted() -> None:
    run = Run()
    run.add(request := EngineRequest(id=1, prompt=[1], max_tokens=9, n=3))
    run.step()
    run.engine.abort(1, choice=1)
    run.finish()
    assert [run.ends[1, choice].finish for choice in range(3)] == ["length", "abort", "length"]
    run.right(request, choice=0)
    run.right(request, choice=2)


def test_aborting_what_has_ended_or_never_was_does_nothing() -> None:
    run = Run()
    run.engine.abort(404)
    assert not run.engine.has_work
    run.add(EngineRequest(id=1, prompt=[1], max_tokens=1))
    run.finish()
    run.engine.abort(1)
    assert not run.engine.has_work


def test_a_waiting_request_that_is_aborted_is_never_scheduled() -> None:
    run = Run(sequences=1)
    run.add(*numbered_requests(2))
    run.step()
    run.engine.abort(1)
    run.finish()
    assert run.tokens.get((1, 0), []) == []
    assert len({row.sequence for inputs in run.executor.steps for row in inputs.rows}) == 1


# --- depth 2 ---------------------------------------------------------------------------------------------------------------------


def test_at_depth_2_two_steps_are_in_flight_and_a_late_end_brings_nothing() -> None:
    run = Run(executor=ScriptedExecutor([7, 8, 2, 9, 9, 9], depth=2))
    run.add(EngineRequest(id=1, prompt=[1], max_tokens=50, stop_ids=[2]))
    run.finish()
    assert run.tokens[1, 0] == [7, 8, 2]
    assert len(run.executor.steps) == 4, "one step too many was under way when the stop was seen"
    assert [inputs.rows[0].tokens for inputs in run.executor.steps[1:]] == [[-1]] * 3


def test_at_depth_2_nothing_is_computed_beyond_a_known_length() -> None:
    run = Run(depth=2)
    run.add(request := EngineRequest(id=1, prompt=[1], max_tokens=5))
    run.finish().right(request)
    assert len(run.executor.steps) == 5
