"""Steps that fail: whose fault it is, who goes on with the right tokens, and when the engine gives up (S26 and the fault table)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.built import EngineFailure
from engine.engine import FRUITLESS_STEPS
from engine.errors import InvalidRequest
from engine.runtime.batch import FROM_PREVIOUS, RowOutput, StepInputs, StepOutputs
from engine.types import EngineRequest
from tests.fixtures.engine_run import Run, numbered_requests
from tests.fixtures.scripted_executor import Fault, PagedExecutor, ScriptedExecutor, layout_of


def _poison(position: int, marker: int = 77) -> Fault:
    """Raises whenever a row reaches `position` in a sequence whose pages were filled by a prompt that starts with `marker`."""
    cursed: set[int] = set()

    def fault(inputs: StepInputs) -> str | None:
        cursed.update(row.sequence for row in inputs.rows if row.position == 0 and row.tokens[0] == marker)
        hit = any(row.sequence in cursed and row.position + len(row.tokens) > position for row in inputs.rows)
        return "the poison works" if hit else None

    return fault


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", range(8))
def test_s26_a_poisonous_request_fails_alone(place: int, depth: int) -> None:
    run = Run(depth=depth, fault=_poison(position=12))
    requests = [EngineRequest(id=i, prompt=[77 if i == place else i, *range(9)], max_tokens=20) for i in range(8)]
    run.add(*requests)
    run.finish()
    end = run.ends[place, 0]
    assert end.finish == "error" and end.error is not None
    assert (end.error.code, end.error.message) == ("engine_error", "the engine failed on this request")
    assert run.tokens[place, 0] == run.paged.expected(requests[place].prompt, 3), "what came before the fault stays"
    for request in requests:
        if request.id != place:
            run.right(request)
            assert run.ends[request.id, 0].finish == "length"
    run.add(after := EngineRequest(id=99, prompt=[5], max_tokens=5))
    run.finish().right(after)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fault_that_does_not_come_back_harms_nobody(depth: int) -> None:
    for at in range(1, 25):
        run = Run(depth=depth, pages=10, windows=(None, 20), fault=lambda inputs, at=at: "once" if inputs.step == at else None)
        requests = numbered_requests(4, prompt=20, max_tokens=15)
        run.add(*requests)
        run.finish()
        for request in requests:
            run.right(request)


@pytest.mark.parametrize("depth", [1, 2])
def test_sampling_state_that_moved_in_a_failed_step_is_put_back(depth: int) -> None:
    script = list(range(100, 130))
    for at in range(1, 12):
        executor = ScriptedExecutor(script, depth=depth, fault=lambda inputs, at=at: "once" if inputs.step == at else None)
        run = Run(executor=executor, budget=8)
        run.add(*numbered_requests(2, prompt=5, max_tokens=12))
        run.finish()
        assert run.tokens == {(0, 0): script[:12], (1, 0): script[:12]}


class _RaisesOnSubmit(PagedExecutor):
    """Refuses a step at submission, with an error meant for a person, while a row is too long."""

    refused = False
    asked_in_vain = 0  # rows that continue from a draw of a step that was refused

    def submit(self, inputs: StepInputs) -> StepInputs:
        self.asked_in_vain += self.refused and any(FROM_PREVIOUS in row.tokens for row in inputs.rows)
        self.refused = any(row.position + len(row.tokens) > 25 for row in inputs.rows)
        if self.refused:
            raise InvalidRequest("a row is too long")
        return super().submit(inputs)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_refused_at_submission_blames_the_row_in_the_executors_words(depth: int) -> None:
    run = Run(executor=(executor := _RaisesOnSubmit(layout_of(None), depth=depth)))
    long, short = EngineRequest(id=0, prompt=[1] * 20, max_tokens=20), EngineRequest(id=1, prompt=[2] * 4, max_tokens=20)
    run.add(long, short)
    run.finish().right(short)
    assert executor.asked_in_vain == 0
    assert run.ends[0, 0].error == InvalidRequest("a row is too long").info
    assert run.tokens[0, 0] == run.paged.expected(long.prompt, 6)


class _NanFor(PagedExecutor):
    """Row errors instead of tokens for sequences in `bad`, from the fifth step on."""

    bad: frozenset[int] = frozenset({1})

    def collect(self, ticket: StepInputs) -> StepOutputs:
        outputs = super().collect(ticket)
        rows = [
            RowOutput(error="the logits are not numbers") if row.sequence in self.bad and ticket.step >= 5 else output
            for row, output in zip(ticket.rows, outputs.rows, strict=True)
        ]
        return StepOutputs(step=outputs.step, rows=rows)


def test_a_row_error_ends_that_sequence_only() -> None:
    run = Run(executor=_NanFor(layout_of(None)))
    requests = numbered_requests(3, prompt=4, max_tokens=10)
    run.add(*requests)
    run.finish()
    error = run.ends[1, 0].error
    assert error is not None and (error.code, error.message) == ("engine_error", "the logits are not numbers")
    assert len(run.tokens[1, 0]) == 4
    run.right(requests[0])
    run.right(requests[2])


def test_when_every_row_fails_the_engine_gives_up_and_ends_all_that_run() -> None:
    run = Run(sequences=2, fault=lambda inputs: "all is lost" if inputs.step >= 3 else None)
    run.add(*numbered_requests(3, prompt=4, max_tokens=10))
    run.step()
    run.step()
    with pytest.raises(EngineFailure) as caught:
        run.step()
    run.take(caught.value.result.outputs)
    assert {key: end.error.code if end.error else "" for key, end in run.ends.items()} == {
        (0, 0): "engine_error",
        (1, 0): "engine_error",
    }
    assert "lost" not in str(caught.value.result)
    assert caught.value.result.stats.waiting == 1
    run.engine.check()


def test_single_requests_that_fail_one_after_another_mean_a_broken_engine() -> None:
    run = Run(fault=lambda inputs: "broken")
    for number in range(FRUITLESS_STEPS - 1):
        run.add(EngineRequest(id=number, prompt=[1], max_tokens=2))
        run.finish()
        assert run.ends[number, 0].finish == "error"
    run.add(EngineRequest(id=9, prompt=[1], max_tokens=2))
    with pytest.raises(EngineFailure):
        run.step()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda outputs: StepOutputs(step=outputs.step + 1, rows=outputs.rows),
        lambda outputs: StepOutputs(step=outputs.step, rows=outputs.rows[:-1]),
    ],
)
def test_an_answer_to_another_question_is_a_failed_step(wrong: Callable[[StepOutputs], StepOutputs]) -> None:
    class Confused(PagedExecutor):
        def collect(self, ticket: StepInputs) -> StepOutputs:
            outputs = super().collect(ticket)
            return wrong(outputs) if ticket.step == 3 else outputs

    run = Run(executor=Confused(layout_of(None)))
    run.add(*(requests := numbered_requests(2, prompt=4, max_tokens=10)))
    run.finish()
    for request in requests:
        run.right(request)


def test_a_fault_of_our_own_is_nobodys_request_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.add(*numbered_requests(2))
    run.step()

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("engine.cache.manager.CacheManager.room", broken)
    with pytest.raises(EngineFailure) as caught:
        run.step()
    assert len(caught.value.result.outputs) == 2
