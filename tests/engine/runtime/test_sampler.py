"""The sampler against a naive oracle in Python floats, the chi-square of its draws, and the edges of every parameter."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from engine.errors import InvalidRequest
from engine.runtime.batch import SamplingSlot
from engine.runtime.philox import uniform
from engine.runtime.sampler import SamplingState, adjust, check, first, pick, sample, survivors
from engine.types import SamplingParams

EDGE = 1e-9  # the oracle abstains when a sum is this close to a threshold


def state(params: SamplingParams, prompt: list[int] | None = None, vocab: int = 64, **slot: Any) -> SamplingState:
    return SamplingState(SamplingSlot(slot=0, params=params, choice=0, prompt=prompt or [1], **slot), vocab)


def naive_scores(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    scores = list(logits)
    for i, bias in p.logit_bias.items():
        scores[i] += bias
    window = (prompt + output)[-p.repeat_last_n :] if p.repeat_last_n > 0 else (prompt + output if p.repeat_last_n else [])
    for i in range(len(scores)):
        if i in window:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        if i in output:
            scores[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
    return scores


def naive_survivors(scores: list[float], p: SamplingParams) -> dict[int, float] | None:
    """id -> weight of those left, or None when a threshold is too close to call in floating point."""
    best = max(scores)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if p.top_k:
        order = order[: p.top_k]
    weight = {i: math.exp((scores[i] - best) / p.temperature) for i in order}
    if p.top_p < 1:
        total, cumulative, kept = math.fsum(weight.values()), 0.0, []
        for i in order:
            if kept and cumulative >= p.top_p * total:
                break
            kept.append(i)
            cumulative += weight[i]
            if abs(cumulative - p.top_p * total) < EDGE:
                return None
        order = kept
    if any(abs(weight[i] - p.min_p) < EDGE for i in order if p.min_p < 1):
        return None
    return {i: weight[i] for i in sorted(order) if weight[i] >= p.min_p}


def naive_draw(weight: dict[int, float], number: float) -> int | None:
    target, cumulative = number * math.fsum(weight.values()), 0.0
    for i, w in weight.items():
        cumulative += w
        if abs(cumulative - target) < EDGE:
            return None
        if cumulative > target:
            return i
    raise AssertionError("unreachable")


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.2, 0.7, 1.0, 1.6]),
        top_k=rng.choice([0, 0, 1, 3, 10, 64, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        repeat_last_n=rng.choice([0, 1, 8, 64, -1]),
        presence_penalty=rng.choice([0.0, 0.7, -0.4]),
        frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
        logit_bias=rng.choice([{}, {}, {3: 2.5, 60: -100.0}]),
        seed=rng.getrandbits(64),
    )


def test_equals_the_naive_oracle() -> None:
    rng, called = random.Random(11), 0
    for _ in range(600):
        params = random_params(rng)
        levels = rng.choice([3, 40, 10_000])  # few levels: many exact ties
        logits = [rng.randrange(levels) / levels * 8 - 4 for _ in range(64)]
        prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 20))]
        output = [rng.randrange(64) for _ in range(rng.randrange(12))]
        given = state(params, prompt, output=output)
        row = torch.tensor(logits, dtype=torch.float64)
        scores = naive_scores(logits, params, prompt, output)
        assert adjust(row, given).tolist() == pytest.approx(scores, abs=1e-12)
        weight = naive_survivors(scores, params)
        token = weight and naive_draw(weight, uniform(params.seed, 0, len(prompt) + len(output)))
        if weight is None or token is None:
            continue
        ids, weights = survivors(adjust(row, given), params)
        assert ids.tolist() == list(weight)
        assert weights.tolist() == pytest.approx(list(weight.values()), rel=1e-12)
        drawn = sample(row, given)
        assert drawn is not None and drawn.id == token
        called += 1
    assert called > 500


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.2),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([0.1, 1.4, -0.5, 0.9, 0.9, -2.0, 0.3, 2.0])
    scores = [float(x) for x in logits.double()]
    weight = naive_survivors(scores, params)
    assert weight is not None
    ids, weights = survivors(logits.double(), params)
    assert ids.tolist() == list(weight)
    draws = Counter(int(ids[pick(weights, uniform(99, 0, i))]) for i in range(20_000))
    assert set(draws) == set(weight)
    total = sum(weight.values())
    chi = sum((draws[i] - 20_000 * w / total) ** 2 / (20_000 * w / total) for i, w in weight.items())
    assert chi < 29.9  # 7 degrees of freedom at p = 0.0001; fewer allow less


def test_large_vocabulary_nucleus_beyond_the_first_look() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5000, generator=generator, dtype=torch.float64) * 0.1
    for top_p in (0.02, 0.3, 0.9, 0.999999):
        params = SamplingParams(top_p=top_p)
        weight = naive_survivors(logits.tolist(), params)
        assert weight is not None
        assert survivors(logits, params)[0].tolist() == list(weight)


def test_ties_at_an_edge_go_to_the_lower_id() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    assert first(scores, 3).tolist() == [1, 2, 3]
    assert survivors(scores, SamplingParams(top_k=2))[0].tolist() == [1, 2]
    assert survivors(torch.zeros(6, dtype=torch.float64), SamplingParams(top_p=0.5))[0].tolist() == [0, 1, 2]
    assert survivors(torch.zeros(6, dtype=torch.float64), SamplingParams(top_p=1e-12))[0].tolist() == [0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0),
        SamplingParams(top_p=1e-9),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=0, top_k=5, top_p=0.3, min_p=0.9),
    ],
)
def test_leaves_only_the_best(params: SamplingParams) -> None:
    logits = torch.tensor([-1.0, 4.0, 9.0, 9.0, 2.0])
    for position in range(1, 30):
        drawn = sample(logits, state(params, [0] * position, vocab=5))
        assert drawn is not None
        # top_k, top_p and temperature 0 take the lower of two equals; a temperature alone cannot part them
        assert drawn.id in ((2, 3) if params.temperature in (1e-6, 5e-324) else (2,))


def test_min_p_of_one_keeps_the_equals_of_the_best() -> None:
    assert survivors(torch.tensor([1.0, 5.0, 5.0]).double(), SamplingParams(min_p=1))[0].tolist() == [1, 2]


def test_a_huge_temperature_is_uniform() -> None:
    _, weights = survivors(torch.tensor([-50.0, 0.0, 80.0]).double(), SamplingParams(temperature=1e18))
    assert weights.tolist() == pytest.approx([1, 1, 1])


def test_a_number_near_one_never_picks_weight_zero() -> None:
    weights = torch.tensor([0.0, 0.3, 0.7, 0.0, 0.0], dtype=torch.float64)
    assert pick(weights, 1 - 2**-53) == 2
    assert pick(weights, 0.0) == 1
    many = torch.full((1000,), 0.1, dtype=torch.float64)
    assert pick(many, 1 - 2**-53) == 999


def test_huge_penalties_stay_finite() -> None:
    params = SamplingParams(repetition_penalty=1e300, presence_penalty=1e300, frequency_penalty=1e300)
    drawn = sample(torch.tensor([5.0, -3.0, 1.0]), state(params, [0], vocab=3, output=[0, 1]))
    assert drawn is not None and drawn.id == 2


def test_bias_bans_and_forces() -> None:
    logits = torch.tensor([9.0, 1.0, 0.0, 2.0])
    for bias, expected in (({0: -100.0}, 3), ({2: 100.0}, 2), ({0: -math.inf, 3: -math.inf}, 1)):
        drawn = sample(logits, state(SamplingParams(temperature=0, logit_bias=bias), vocab=4))
        assert drawn is not None and drawn.id == expected
    everything = dict.fromkeys(range(4), -math.inf)
    assert sample(logits, state(SamplingParams(logit_bias=everything), vocab=4)) is None


def test_all_filtered_but_one() -> None:
    bias = {i: -math.inf for i in range(64) if i != 37}
    for position in range(1, 50):
        drawn = sample(torch.zeros(64), state(SamplingParams(logit_bias=bias, temperature=2.0), [1] * position))
        assert drawn is not None and drawn.id == 37


def test_stop_ids_wait_for_min_tokens() -> None:
    logits = torch.tensor([1.0, 8.0, 3.0, 7.0])
    given = state(SamplingParams(temperature=0), vocab=4, stop_ids=[1, 3, 999], min_tokens=2)
    ids = []
    for _ in range(3):
        drawn = sample(logits, given)
        assert drawn is not None
        given.append(drawn.id)
        ids.append(drawn.id)
    assert ids == [2, 2, 1]


@pytest.mark.parametrize(
    ("last_n", "expected"), [(0, set()), (1, {7}), (3, {5, 6, 7}), (-1, {1, 2, 5, 6, 7}), (99, {1, 2, 5, 6, 7})]
)
def test_b17_window_is_over_prompt_and_output(last_n: int, expected: set[int]) -> None:
    params = SamplingParams(repetition_penalty=2.0, repeat_last_n=last_n)
    warm = state(params, [1, 2, 5], output=[6, 7])
    cold = state(params, [1, 2, 5])
    for token in (6, 7):
        cold.append(token)
    for given in (warm, cold):
        scores = adjust(torch.ones(64), given)
        assert set((scores != 1).nonzero().flatten().tolist()) == expected


def test_b17_presence_and_frequency_count_output_only() -> None:
    given = state(SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), [4, 4, 5], output=[5, 6, 6])
    scores = adjust(torch.zeros(64), given)
    assert scores[[4, 5, 6]].tolist() == [0.0, -1.5, -2.0]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([0.5, 2.0, 2.0, -1.0, 0.5])
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={3: 50.0})
    drawn = sample(logits, state(params, vocab=5, logprobs=4))
    expected = [x - math.log(sum(math.exp(y) for y in logits.tolist())) for x in logits.tolist()]
    assert drawn is not None and drawn.id == 3
    assert drawn.logprob == pytest.approx(expected[3], abs=1e-12)
    assert [i for i, _ in drawn.top] == [1, 2, 0, 4]  # ties to the lower id
    assert [p for _, p in drawn.top] == pytest.approx([expected[i] for i in (1, 2, 0, 4)], abs=1e-12)
    none, only = (sample(logits, state(params, vocab=5, logprobs=n)) for n in (None, 0))
    assert none is not None and none.logprob is None
    assert only is not None and only.top == [] and only.logprob == drawn.logprob


def test_a_mask_leaves_what_its_bits_allow() -> None:
    logits = torch.arange(20, dtype=torch.float32)
    allowed = bytes([0b00100001, 0b00000010, 0])  # ids 0, 5 and 9
    drawn = sample(logits, state(SamplingParams(temperature=0), vocab=20), allowed)
    assert drawn is not None and drawn.id == 9
    assert sample(logits, state(SamplingParams(), vocab=20), bytes(3)) is None


def test_a_seed_repeats_and_a_choice_differs() -> None:
    logits = torch.zeros(64)

    def draws(seed: int, choice: int) -> list[int]:
        slot = SamplingSlot(slot=0, params=SamplingParams(seed=seed), choice=choice, prompt=[1])
        given, ids = SamplingState(slot, 64), []
        for _ in range(20):
            drawn = sample(logits, given)
            assert drawn is not None
            given.append(drawn.id)
            ids.append(drawn.id)
        return ids

    assert draws(2**64 - 1, 0) == draws(2**64 - 1, 0)
    assert len({tuple(draws(s, c)) for s in (1, 2) for c in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("repetition_penalty", 0.0),
        ("repeat_last_n", -2),
        ("logit_bias", {64: 1.0}),
        ("logit_bias", {0: math.inf}),
        ("logit_bias", {0: math.nan}),
        ("seed", 2**64),
        ("presence_penalty", math.inf),
    ],
)
def test_refuses_what_has_no_meaning(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        check(SamplingParams(**{field: value}), 64)
