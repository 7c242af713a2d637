"""The real model in float32: what company, chunks and a warm prefix may change is the last digits of the log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.runtime.load import build_engine
from engine.types import EngineRequest, SamplingParams, TokenOutput, WorkerConfig

TOLERANCE = 1e-4
COUNT = 12
PROMPTS = [[(17 * i + 31 * t + t * t) % 49_000 + 20 for t in range(length)] for i, length in enumerate([5, 40, 150, 33])]


@pytest.fixture(scope="module")
def engine(real_model_path: Path) -> Iterator[Engine]:
    """One engine for all: every request has a salt of its own, so that nothing is found that a test does not put there."""
    config = WorkerConfig(model_path=str(real_model_path), format="gguf", context_tokens=1024, max_step_tokens=256)
    engine = build_engine(config, lambda stage, fraction: None).engine
    yield engine
    engine.executor.close()


def _request(number: int, prompt: list[int], salt: str) -> EngineRequest:

    sampling = SamplingParams(temperature=0.0)
    return EngineRequest(id=number, prompt=prompt, max_tokens=COUNT, sampling=sampling, logprobs=5, salt=salt)


def _run(engine: Engine, *requests: EngineRequest) -> dict[int, list[TokenOutput]]:
    found: dict[int, list[TokenOutput]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        result = engine.step()
        assert result is not None
        engine.check()
        for output in result.outputs:
            assert output.error is None
            found.setdefault(output.request, []).extend(output.tokens)
    return found


def _same(one: list[TokenOutput], other: list[TokenOutput]) -> None:
    """Equal tokens with log-probabilities within the tolerance, up to where two candidates are closer than that."""
    for a, b in zip(one, other, strict=True):
        assert a.logprob is not None and b.logprob is not None
        if a.id != b.id:
            assert a.top[0][1] - a.top[1][1] < TOLERANCE, "another token, and it was no close call"
            return
        assert abs(a.logprob - b.logprob) < TOLERANCE
        scores = dict(b.top)
        assert all(abs(logprob - scores[token]) < TOLERANCE for token, logprob in a.top if token in scores)


def test_log_probabilities_alone_in_company_in_chunks_and_from_a_warm_prefix(engine: Engine) -> None:
    alone = [_run(engine, _request(i, prompt, f"alone {i}"))[i] for i, prompt in enumerate(PROMPTS)]
    company = _run(engine, *(_request(10 + i, prompt, f"company {i}") for i, prompt in enumerate(PROMPTS)))
    warm = _run(engine, *(_request(20 + i, prompt, f"alone {i}") for i, prompt in enumerate(PROMPTS)))
    assert engine.stats.hit_tokens >= sum(len(prompt) - 1 for prompt in PROMPTS)
    engine._scheduler._max_step_tokens = 7
    chunks = _run(engine, *(_request(30 + i, prompt, f"chunks {i}") for i, prompt in enumerate(PROMPTS)))
    for i, expected in enumerate(alone):
        for found in (company[10 + i], warm[20 + i], chunks[30 + i]):
            _same(expected, found)
