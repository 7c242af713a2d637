"""The native sampler against the Python one: the same token and log-probabilities for random rows and settings of the whole set."""

from __future__ import annotations

import ctypes
import math
import random
from array import array
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.errors import InvalidRequest
from engine.kernels.cpu.lib import load
from engine.runtime.batch import SamplingSlot
from engine.runtime.native_executor import slot_numbers, slot_words
from engine.runtime.philox import uniform
from engine.runtime.sampler import SamplingState, adjust, sample, survivors
from engine.types import SamplingParams, TokenOutput

BOUNDARY = 1e-9
MOST_TOP = 20
NOT_FINITE, NOTHING_ALLOWED = 2, 3


@dataclass
class Native:
    status: int
    token: int
    logprob: float
    top: list[tuple[int, float]]


def native_sample(logits: torch.Tensor, slot: SamplingSlot, allowed: bytes | None = None) -> Native:
    words = array("q", [number for part in slot_words(slot) for number in part])
    numbers = array("d", slot_numbers(slot))
    status, token, count = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
    logprob, error = ctypes.c_double(), ctypes.create_string_buffer(512)
    ids, logprobs = (ctypes.c_int32 * MOST_TOP)(), (ctypes.c_double * MOST_TOP)()
    code = load().functions.cavectl_sample(
        logits.data_ptr(),
        len(logits),
        (ctypes.c_int64 * len(words)).from_buffer(words),
        len(words),
        (ctypes.c_double * len(numbers)).from_buffer(numbers),
        len(numbers),
        allowed,
        status,
        token,
        logprob,
        MOST_TOP,
        count,
        ids,
        logprobs,
        error,
    )
    if code:
        raise InvalidRequest(error.value.decode())
    return Native(status.value, token.value, logprob.value, list(zip(ids[: count.value], logprobs[: count.value], strict=True)))


def _logits(rng: random.Random, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    logits = torch.randn(vocab, generator=generator) * rng.choice([0.1, 1.0, 4.0, 30.0])
    if rng.random() < 0.3:
        logits = (logits * 4).round() / 4  # ties
    return logits


def _params(rng: random.Random, vocab: int) -> SamplingParams:
    def now_and_then(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 30.0]),
        top_k=now_and_then(0.4, rng.choice([1, 2, 5, 40, vocab, vocab + 3]), 0),
        top_p=now_and_then(0.5, rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0),
        min_p=now_and_then(0.3, rng.choice([0.001, 0.05, 0.3, 1.0]), 0.0),
        repetition_penalty=now_and_then(0.3, rng.choice([0.5, 1.1, 2.0]), 1.0),
        repeat_last_n=rng.choice([-1, 0, 3, 64]),
        presence_penalty=now_and_then(0.3, rng.uniform(-2, 2), 0.0),
        frequency_penalty=now_and_then(0.3, rng.uniform(-2, 2), 0.0),
        logit_bias=now_and_then(0.3, {rng.randrange(vocab): rng.choice([-100.0, -math.inf, 3.0, 100.0]) for _ in range(4)}, {}),
        seed=rng.getrandbits(64),
    )


def _slot(rng: random.Random, vocab: int) -> SamplingSlot:
    return SamplingSlot(
        slot=0,
        params=_params(rng, vocab),
        choice=rng.randrange(4),
        prompt=[rng.randrange(vocab) for _ in range(rng.randrange(1, 30))],
        output=[rng.randrange(vocab) for _ in range(rng.randrange(30))],
        stop_ids=[rng.randrange(vocab + 3) for _ in range(rng.randrange(3))],
        min_tokens=rng.choice([0, 0, 10, 40]),
        logprobs=rng.choice([None, None, None, 0, 5, MOST_TOP]),
    )


def _mask(rng: random.Random, vocab: int) -> bytes | None:
    kind = rng.random()
    if kind < 0.7:
        return None
    if kind < 0.75:
        return bytes((vocab + 7) // 8)
    bits = bytearray(rng.randbytes((vocab + 7) // 8))
    if kind < 0.85:  # few are left
        bits = bytearray(len(bits))
        for token in rng.choices(range(vocab), k=3):
            bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def _near_a_boundary(logits: torch.Tensor, state: SamplingState, allowed: bytes | None) -> bool:
    """Whether the draw, or what a filter keeps, hangs on less than BOUNDARY of the whole."""
    scores = adjust(logits, state)
    if allowed is not None:
        keep = torch.tensor([bool(allowed[i // 8] >> i % 8 & 1) for i in range(len(scores))])
        scores = scores.masked_fill(~keep, -math.inf)
    _, weights = survivors(scores, state.params)
    shares = weights.cumsum(0) / weights.sum()
    number = uniform(state.params.seed, state.choice, len(state.tokens))
    if float((shares - number).abs().min()) < BOUNDARY:
        return True
    best = ((scores - scores.max()) / state.params.temperature).exp().sort(descending=True).values
    nucleus = best.cumsum(0) / best.sum() - state.params.top_p
    return float(nucleus.abs().min()) < BOUNDARY or float((best - state.params.min_p).abs().min()) < BOUNDARY


def _compare(native: Native, python: TokenOutput | None) -> None:
    if python is None:
        assert native.status == NOTHING_ALLOWED
        return
    assert native.status == 1
    if python.logprob is None or native.token != python.id:
        return
    assert native.logprob == pytest.approx(python.logprob, rel=1e-12, abs=1e-12)
    assert [token for token, _ in native.top] == [token for token, _ in python.top]
    assert [p for _, p in native.top] == pytest.approx([p for _, p in python.top], rel=1e-12, abs=1e-12)


def _rows(count: int, seed: int) -> int:
    """Compares so many rows; gives how many draws were too close to a boundary to be the same."""
    rng, close = random.Random(seed), 0
    for _ in range(count):
        vocab = rng.choice([8, 9, 31, 64, 100, 257, 1000, 5000])
        logits, slot, allowed = _logits(rng, vocab), _slot(rng, vocab), _mask(rng, vocab)
        state = SamplingState(slot, vocab)
        python, native = sample(logits, state, allowed), native_sample(logits, slot, allowed)
        _compare(native, python)
        if python is not None and native.token != python.id:
            assert _near_a_boundary(logits, state, allowed), (slot, python, native)
            close += 1
    return close


def test_the_same_token_as_the_python_sampler() -> None:
    assert _rows(10_000, seed=1) < 5


@pytest.mark.full
def test_the_same_token_as_the_python_sampler_in_100_000_rows() -> None:
    assert _rows(100_000, seed=2) < 5


def test_the_draw_of_a_large_vocabulary_is_the_same() -> None:
    rng = random.Random(3)
    for params in ({}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.05}, {"top_p": 0.9999}, {"temperature": 0.0}):
        logits = torch.randn(151_936, generator=torch.Generator().manual_seed(4)) * 3
        slot = SamplingSlot(slot=0, params=SamplingParams(seed=rng.getrandbits(64), **params), choice=0, prompt=[5], logprobs=20)
        python = sample(logits, SamplingState(slot, len(logits)))
        assert python is not None
        native = native_sample(logits, slot)
        assert native.token == python.id
        assert native.logprob == pytest.approx(python.logprob, rel=1e-11)
        assert [token for token, _ in native.top] == [token for token, _ in python.top]


def test_scores_beyond_float64_are_named() -> None:
    logits = torch.linspace(1, 20, 100)
    for more in ({"min_p": 0.1}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}, {}):
        params = SamplingParams(**{"repetition_penalty": 1e-310, "temperature": 1.0, **more})
        slot = SamplingSlot(slot=0, params=params, choice=0, prompt=[7, 99], logprobs=5)
        assert native_sample(logits, slot).status == NOT_FINITE


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_temperatures_at_the_ends_of_their_range(temperature: float) -> None:
    rng = random.Random(5)
    for number in range(300):
        vocab = rng.choice([9, 64, 257, 1000])
        logits, filters = _logits(rng, vocab), rng.choice([{"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 5}, {}])
        slot = SamplingSlot(slot=0, params=SamplingParams(temperature=temperature, seed=number, **filters), choice=0, prompt=[1])
        python = sample(logits, SamplingState(slot, vocab))
        assert python is not None and native_sample(logits, slot).token == python.id


def test_log_probabilities_of_huge_logits() -> None:
    slot = SamplingSlot(slot=0, params=SamplingParams(temperature=0.0), choice=0, prompt=[1], logprobs=2)
    logits = torch.full((9,), 3e38)
    python, native = sample(logits, SamplingState(slot, 9)), native_sample(logits, slot)
    assert python is not None and native.logprob == pytest.approx(python.logprob)
    assert native.top == [(i, pytest.approx(p)) for i, p in python.top]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 17, 99])
def test_a_row_that_is_not_finite_is_named(bad: float, at: int) -> None:
    logits = torch.randn(100)
    logits[at] = bad
    for temperature in (0.0, 1.0):
        slot = SamplingSlot(slot=0, params=SamplingParams(temperature=temperature), choice=0, prompt=[1])
        assert native_sample(logits, slot).status == NOT_FINITE


def test_huge_logits_are_finite() -> None:
    logits = torch.full((33,), 3e38)
    logits[7] = -3e38
    slot = SamplingSlot(slot=0, params=SamplingParams(temperature=0.0), choice=0, prompt=[1])
    assert native_sample(logits, slot).token == 0


WRONG = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"top_k": -1},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"repetition_penalty": 0.0},
    {"presence_penalty": math.inf},
    {"repeat_last_n": -2},
    {"logit_bias": {100: 1.0}},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": {1: math.inf}},
    {"seed": 1 << 64},
]


@pytest.mark.parametrize("change", WRONG)
def test_what_has_no_meaning_is_refused(change: dict[str, Any]) -> None:
    slot = SamplingSlot(slot=0, params=SamplingParams(**change), choice=0, prompt=[1])
    with pytest.raises(InvalidRequest, match="out of range"):
        native_sample(torch.zeros(100), slot)


@pytest.mark.parametrize("change", [{"prompt": [100]}, {"prompt": [-1]}, {"output": [200]}])
def test_tokens_outside_the_vocabulary_are_refused(change: dict[str, Any]) -> None:
    slot = SamplingSlot(**{"slot": 0, "params": SamplingParams(), "choice": 0, "prompt": [1], **change})
    with pytest.raises(InvalidRequest):
        native_sample(torch.zeros(100), slot)
