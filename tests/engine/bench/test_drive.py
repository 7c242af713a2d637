from __future__ import annotations

import pytest

from engine.types import SequenceOutput, StepResult
from tests.engine.bench.virtual_subject import STEP_MS, TOKEN_MS, virtual_subject


def test_times_are_those_of_the_steps() -> None:
    """20 tokens are fed in the first step and one in each later one; a second request comes after 3 tokens."""
    drive = virtual_subject().drive()
    stream = drive.add(list(range(20)), 6)
    drive.until_tokens(stream, 3)
    late = drive.add(list(range(100, 108)), 2)
    drive.finish()
    first, single = STEP_MS + 20 * TOKEN_MS, STEP_MS + TOKEN_MS
    assert stream.first_token_ms == pytest.approx(first)
    assert stream.gaps_ms == pytest.approx([single, single, STEP_MS + 9 * TOKEN_MS, STEP_MS + 2 * TOKEN_MS, single])
    assert late.arrived == pytest.approx((first + 2 * single) / 1e3)
    assert late.first_token_ms == pytest.approx(STEP_MS + 9 * TOKEN_MS)
    assert [step.prefill_tokens for step in drive.steps] == [20, 0, 0, 8, 0, 0]
    assert [step.decode_tokens for step in drive.steps] == [0, 1, 1, 1, 2, 1]
    assert sum(step.ms for step in drive.steps) == pytest.approx(drive.now() * 1e3)


def test_what_ended_is_known() -> None:
    drive = virtual_subject().drive()
    stream, other = drive.add([1, 2, 3], 2), drive.add([4, 5, 6], 50)
    assert drive.live == 2
    drive.until_tokens(stream, 2)
    assert stream.finish == "length" and stream.usage is not None and stream.usage.output_tokens == 2
    assert other.finish is None and drive.live == 1
    drive.stop(other)
    assert other.finish == "abort" and drive.live == 0 and not drive.engine.has_work
    assert drive.step() is None


def test_a_stream_too_short_for_the_measurement_is_an_error() -> None:
    drive = virtual_subject().drive()
    stream = drive.add([1, 2, 3], 2)
    with pytest.raises(RuntimeError, match="ended after 2 tokens, 3 were"):
        drive.until_tokens(stream, 3)


def test_a_failed_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of a run in which something failed must never be told."""
    drive = virtual_subject().drive()
    drive.add([1, 2, 3], 2)

    def fail(inputs: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(drive.engine.executor, "submit", fail)
    with pytest.raises(Exception, match="failed"):
        drive.finish()


def test_several_tokens_of_a_step_have_one_time() -> None:
    from engine.types import TokenOutput

    drive = virtual_subject().drive()
    stream = drive.add([1, 2, 3], 9)
    assert drive.step()
    output = SequenceOutput(request=0, tokens=[TokenOutput(5), TokenOutput(6)])
    drive._take(StepResult([output], drive.engine.stats), 7.0)
    assert stream.times[1:] == [7.0, 7.0] and stream.gaps_ms[-1] == 0


def test_engines_of_one_subject_share_nothing_but_the_executor() -> None:
    subject = virtual_subject()
    one = subject.drive()
    prompt = list(range(50))
    one.add(prompt, 2)
    one.finish()
    other = subject.drive()
    stream = other.add(prompt, 2)
    other.finish()
    assert stream.usage is not None and stream.usage.cached_tokens == 0
    again = one.add(prompt, 2)
    one.finish()
    assert again.usage is not None and again.usage.cached_tokens == 49
