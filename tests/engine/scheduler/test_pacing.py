"""Chunks against machines that exist only as formulas: how soon the target is met, and what happens where it cannot be."""

from __future__ import annotations

import random
import statistics

import pytest

from engine.scheduler.pacing import FIRST_TOKENS, LEAST_TOKENS, PREFILL_STEP_MS, Pacing


def _run(pacing: Pacing, *, base_ms: float, token_ms: float, steps: int, decodes: int = 1, noise: float = 0.0) -> list[float]:
    """Step times of a long prompt beside `decodes` streams; the cost of a token grows by half over the way."""
    chance = random.Random(7)
    times = []
    for step in range(steps):
        prompt = pacing.budget(decodes)
        cost = token_ms * (1 + 0.5 * step / steps)
        times.append((base_ms + cost * prompt) * chance.uniform(1 - noise, 1 + noise))
        pacing.observe(times[-1], decodes, prompt)
    return times


@pytest.mark.parametrize("token_ms", [0.01, 0.3, 1.5])
@pytest.mark.parametrize("base_ms", [1.0, 20.0, 35.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_target_is_met_where_the_machine_can(base_ms: float, token_ms: float, noise: float) -> None:
    pacing = Pacing(target_ms=50.0, max_step_tokens=512)
    for _ in range(5):
        pacing.observe(base_ms, 1, 0)
    times = sorted(_run(pacing, base_ms=base_ms, token_ms=token_ms, steps=200, noise=noise))
    if base_ms + 1.5 * token_ms * LEAST_TOKENS > 50.0:
        assert pacing.chunk_tokens == LEAST_TOKENS
        return
    assert times[int(0.95 * len(times))] <= 1.5 * 50.0
    reachable = min(50.0, base_ms + token_ms * 511)
    assert statistics.median(times) >= 0.6 * reachable, "time was left unused"


def test_where_a_decode_alone_takes_too_long_prompts_still_move_on() -> None:
    pacing = Pacing(target_ms=50.0, max_step_tokens=512)
    pacing.observe(120.0, 4, 0)
    _run(pacing, base_ms=120.0, token_ms=2.0, steps=10, decodes=4)
    assert pacing.budget(4) == LEAST_TOKENS


def test_one_slow_step_is_not_the_end() -> None:
    pacing = Pacing(target_ms=50.0, max_step_tokens=512)
    _run(pacing, base_ms=5.0, token_ms=0.2, steps=30)
    before = pacing.chunk_tokens
    pacing.observe(5000.0, 1, before)
    assert pacing.chunk_tokens >= before / 1.6
    _run(pacing, base_ms=5.0, token_ms=0.2, steps=5)
    assert pacing.chunk_tokens >= 0.8 * before


def test_a_short_prompt_in_good_time_says_nothing() -> None:
    pacing = Pacing(target_ms=50.0, max_step_tokens=512)
    pacing.observe(10.0, 1, 3)
    assert pacing.chunk_tokens == FIRST_TOKENS


def test_without_a_stream_a_step_is_bounded_by_time_alone() -> None:
    pacing = Pacing(target_ms=50.0, max_step_tokens=512)
    assert pacing.budget(0) == 512
    pacing.observe(512 * 20.0, 0, 512)
    assert pacing.budget(0) == PREFILL_STEP_MS / 20.0
    for _ in range(60):
        pacing.observe(pacing.budget(0) * 0.1, 0, pacing.budget(0))
    assert pacing.budget(0) == 512


@pytest.mark.parametrize("most", [1, 2, 16, 512])
def test_never_more_than_a_step_can_take(most: int) -> None:
    pacing = Pacing(target_ms=50.0, max_step_tokens=most)
    for decodes in range(most + 2):
        assert 0 <= pacing.budget(decodes) <= most - min(decodes, most)
        pacing.observe(1.0, decodes, pacing.budget(decodes))
