from __future__ import annotations

import pytest

from engine.bench.hash_executor import HashExecutor, VirtualClock
from engine.runtime.batch import Row, SamplingSlot, StepInputs
from engine.types import SamplingParams


def slot(number: int, prompt: list[int], output: list[int] | None = None) -> SamplingSlot:
    return SamplingSlot(slot=number, params=SamplingParams(), choice=0, prompt=prompt, output=output or [])


def row(tokens: list[int], sampling: int = -1) -> Row:
    return Row(sequence=0, tokens=tokens, position=0, pages=[[0]], sampling=sampling)


def drawn(executor: HashExecutor, inputs: StepInputs) -> list[list[int]]:
    outputs = executor.collect(executor.submit(inputs))
    assert outputs.step == inputs.step
    return [[token.id for token in result.tokens] for result in outputs.rows]


def test_tokens_go_on_after_a_preemption_as_if_nothing_had_been() -> None:
    executor = HashExecutor(VirtualClock(), step_ms=1, token_ms=1, vocab_size=1000)
    prompt = [5, 6, 7]
    first = drawn(executor, StepInputs(step=1, rows=[row(prompt, 3)], opened=[slot(3, prompt)]))
    second = drawn(executor, StepInputs(step=2, rows=[row(first[0], 3)]))
    executor = HashExecutor(VirtualClock(), step_ms=1, token_ms=1, vocab_size=1000)
    assert drawn(executor, StepInputs(step=9, rows=[row(prompt, 0)], opened=[slot(0, prompt, first[0])])) == second
    assert all(0 <= token < 1000 for token in first[0] + second[0]) and first != second


def test_prompts_draw_tokens_of_their_own_and_chunks_draw_none() -> None:
    executor = HashExecutor(VirtualClock(), step_ms=1, token_ms=1, vocab_size=10**9)
    inputs = StepInputs(step=1, rows=[row([1], 0), row([2], 1), row([3, 4])], opened=[slot(0, [1]), slot(1, [2])])
    one, other, none = drawn(executor, inputs)
    assert len(one) == len(other) == 1 and one != other and none == []


def test_a_step_takes_its_time() -> None:
    clock = VirtualClock()
    executor = HashExecutor(clock, step_ms=10, token_ms=0.5, vocab_size=10)
    drawn(executor, StepInputs(step=1, rows=[row([1, 2, 3]), row([4])]))
    assert clock() == pytest.approx(0.012)
