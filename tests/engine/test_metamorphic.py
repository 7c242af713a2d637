"""TinyRand in float64 through the whole engine: a request's tokens depend on nothing but the request.

Alone = in any batch = in any order = in chunks of 1, 7, 16 or all = from a cold or warm prefix = preempted at every step = with its
prefix shared by others = what recomputing the whole sequence gives; greedy and sampled, full attention and a window. Rows B09, B17,
B33, B45 and B46 of the case list. Over HTTP and across file formats: tests/daemon/test_metamorphic.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch

from engine.built import EngineOptions
from engine.cache.layout import cache_layout
from engine.engine import Engine
from engine.models.families import family_for
from engine.runtime.torch_executor import TorchExecutor
from engine.types import EngineRequest, SamplingParams
from engine.weights.loader import load_weights
from engine.weights.source import open_source
from tests.fixtures.tiny_rand import TinyRand, oracle_greedy, tiny_rand

Tokens = dict[tuple[int, int], list[int]]
WINDOWS = [None, 8, 20]
GREEDY = SamplingParams(temperature=0.0)
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repeat_last_n": 24}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and lose much to it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def _model(window: int | None) -> TinyRand:
    return tiny_rand(5, window=window)


@cache
def _weights(window: int | None) -> dict[str, torch.Tensor]:
    model = _model(window)
    family = family_for(model.config["model_type"])
    spec = family.spec(model.config, 512)
    with TemporaryDirectory() as folder:
        source = open_source(str(model.save(Path(folder) / "model")), "safetensors")
        try:
            return load_weights(source, spec, family.parameters(spec), "float64", "cpu", lambda stage, fraction: None)
        finally:
            source.close()


def _engine(window: int | None, *, pages: int = 120, budget: int = 512, options: EngineOptions | None = None) -> Engine:
    model = _model(window)
    spec = family_for(model.config["model_type"]).spec(model.config, 512)
    layout = cache_layout(spec, "float64")
    executor = TorchExecutor(
        spec, _weights(window), layout, [pages], dtype="float64", kv_dtype="float64", device="cpu", max_slots=16
    )
    return Engine(
        executor, layout, [pages], context_tokens=512, max_step_tokens=budget, max_sequences=16, options=options or EngineOptions()
    )


def _run(engine: Engine, *requests: EngineRequest) -> Tokens:
    tokens: Tokens = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        result = engine.step()
        assert result is not None
        engine.check()
        for output in result.outputs:
            assert output.error is None
            tokens.setdefault((output.request, output.choice), []).extend(token.id for token in output.tokens)
    return tokens


def _requests(sampling: SamplingParams | None = None) -> list[EngineRequest]:
    """Seven prompts of 1 to 50 tokens; sampled ones have a seed each."""
    lengths = [1, 3, 15, 16, 17, 33, 50]
    return [
        EngineRequest(
            id=i,
            prompt=[(31 * i + 7 * t + t * t) % 320 for t in range(length)],
            max_tokens=28,
            sampling=sampling or SamplingParams(seed=i, temperature=1.5, top_p=0.95, min_p=0.001, **PENALISED),
            n=1 if sampling else 1 + i % 2,
        )
        for i, length in enumerate(lengths)
    ]


@cache
def _alone(window: int | None, greedy: bool) -> Tokens:
    """Every request by itself, whole prompt in one step."""
    tokens: Tokens = {}
    for request in _requests(GREEDY if greedy else None):
        tokens |= _run(_engine(window), request)
    return tokens


@pytest.mark.parametrize("window", WINDOWS)
def test_greedy_alone_is_what_recomputing_everything_gives(window: int | None) -> None:
    for request in _requests(GREEDY):
        assert _alone(window, greedy=True)[request.id, 0] == oracle_greedy(_model(window), request.prompt, request.max_tokens)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 16, 512])
def test_in_a_batch_and_in_any_chunks(window: int | None, greedy: bool, budget: int) -> None:
    requests = _requests(GREEDY if greedy else None)
    assert _run(_engine(window, budget=budget), *requests) == _alone(window, greedy)


@pytest.mark.parametrize("window", WINDOWS)
def test_in_any_order(window: int | None) -> None:
    assert _run(_engine(window), *reversed(_requests())) == _alone(window, greedy=False)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("greedy", [True, False])
def test_preempted_in_a_pool_of_six_pages(window: int | None, greedy: bool) -> None:
    requests = _requests(GREEDY if greedy else None)
    assert _run(_engine(window, pages=6), *requests) == _alone(window, greedy)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("greedy", [True, False])
def test_preempted_at_every_step(window: int | None, greedy: bool) -> None:
    engine = _engine(window)
    tokens: Tokens = {}
    for request in _requests(GREEDY if greedy else None):
        engine.add(request)
    while engine.has_work:
        for sequence in list(engine._scheduler.running.values()):
            engine._scheduler.preempt(sequence, 0.0)
        engine.check()
        result = engine.step()
        assert result is not None
        for output in result.outputs:
            tokens.setdefault((output.request, output.choice), []).extend(token.id for token in output.tokens)
    assert engine.stats.preemptions > 100
    assert tokens == _alone(window, greedy)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("budget", [7, 512])
def test_from_a_warm_prefix(window: int | None, greedy: bool, budget: int) -> None:
    """A second and third time from what the first left, and from longer prompts that begin alike; penalties included (B17)."""
    engine, requests, cached = _engine(window, budget=budget), _requests(GREEDY if greedy else None), []
    for round_ in range(3):
        again = [msgspec.structs.replace(request, id=100 * round_ + request.id) for request in requests]
        found = _run(engine, *again)
        assert {(key % 100, choice): tokens for (key, choice), tokens in found.items()} == _alone(window, greedy)
        cached.append(engine.stats.hit_tokens)
    assert cached[1] - cached[0] >= sum(len(request.prompt) - 1 for request in requests)


@pytest.mark.parametrize("window", WINDOWS)
def test_with_the_prefix_cache_off(window: int | None) -> None:
    engine = _engine(window, options=EngineOptions(prefix_cache=False))
    assert _run(engine, *_requests()) == _alone(window, greedy=False)
    assert engine.stats.hit_tokens == 0


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pages", [12, 120])
def test_prompts_that_begin_alike_at_the_same_time(window: int | None, pages: int) -> None:
    start = [(3 * t + t * t) % 320 for t in range(60)]
    requests = [
        EngineRequest(id=i, prompt=[*start[:shared], 300 + i], max_tokens=20, n=2, sampling=SamplingParams(seed=i, temperature=1.2))
        for i, shared in enumerate([60, 60, 33, 17, 48, 5])
    ]
    alone: Tokens = {}
    for request in requests:
        alone |= _run(_engine(window, options=EngineOptions(prefix_cache=False)), request)
    engine = _engine(window, pages=pages, budget=24)
    assert _run(engine, *requests) == alone
    assert engine.stats.hit_tokens > 150


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("budget", [3, 512])
def test_b33_past_a_window_of_8_cold_chunked_and_from_a_shared_prefix(length: int, budget: int) -> None:
    engine, prompt = _engine(8, budget=budget), [(5 * t + t * t) % 320 for t in range(length)]
    expected = oracle_greedy(_model(8), prompt, 20)
    for number in range(3):
        assert _run(engine, EngineRequest(id=number, prompt=prompt, max_tokens=20, sampling=GREEDY)) == {(number, 0): expected}
    assert engine.stats.hit_tokens == 2 * (length - 1)
    longer = [*prompt, *expected[:15]]
    again = _run(engine, EngineRequest(id=9, prompt=longer, max_tokens=5, sampling=GREEDY))
    assert again == {(9, 0): expected[15:]}
    assert engine.stats.hit_tokens == 2 * (length - 1) + len(longer) - 1


def test_seeds_and_choices_differ() -> None:
    twice = [tokens for (request, _), tokens in _alone(None, greedy=False).items() if request == 1]
    assert len(twice) == 2 and twice[0] != twice[1]
    assert _alone(None, greedy=False)[1, 0] != _alone(None, greedy=True)[1, 0]


def test_an_abort_of_a_neighbour_changes_nothing() -> None:
    engine, requests = _engine(None, pages=10), _requests()
    for request in requests:
        engine.add(request)
    tokens: Tokens = {}
    for step in range(10_000):
        if step == 9:
            engine.abort(2)
            engine.check()
        if not engine.has_work:
            break
        result = engine.step()
        assert result is not None
        for output in result.outputs:
            tokens.setdefault((output.request, output.choice), []).extend(token.id for token in output.tokens)
    alone = _alone(None, greedy=False)
    assert {key: t for key, t in tokens.items() if key[0] != 2} == {key: t for key, t in alone.items() if key[0] != 2}
