"""The native backend through the whole engine: a request's tokens and log-probabilities are the same bits whatever else runs.

Alone = in any batch = in any order = in chunks of 1, 7, 16 or all = from a cold or warm prefix = preempted at every step = with its
prefix shared = on any number of threads and every instruction set = again; greedy and sampled, full attention and windows,
each type of cache; tiny float models and the real one in 4 and 8 bits. Rows B09, B17, B33, B45 and B46 of the case list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from engine.built import EngineOptions
from engine.cache.layout import KvDtype, cache_layout
from engine.engine import Engine
from engine.kernels.cpu.lib import load
from engine.models.families import family_for
from engine.runtime.native_executor import NativeExecutor
from engine.types import EngineRequest, SamplingParams, TokenOutput
from engine.weights.packed import PackedFile, open_or_pack
from engine.weights.source import open_source
from tests.fixtures.tiny_rand import oracle_greedy, tiny_rand

Tokens = dict[tuple[int, int], list[TokenOutput]]
WINDOWS = [None, 8, 20]
GREEDY = SamplingParams(temperature=0.0)
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repeat_last_n": 24}


@cache
def _tiny(window: int | None) -> tuple[Any, PackedFile]:
    model = tiny_rand(5, window=window)
    with TemporaryDirectory() as folder:
        return _packed(str(model.save(Path(folder) / "model")), "safetensors")


def _packed(path: str, format_: Any) -> tuple[Any, PackedFile]:
    source = open_source(path, format_)
    try:
        family = family_for(source.info.architecture)
        spec = family.spec(source.info.config, 512)
        return spec, open_or_pack(source, spec, family.parameters(spec), progress=lambda stage, fraction: None)
    finally:
        source.close()


@contextmanager
def _engine(
    model: tuple[Any, PackedFile],
    *,
    pages: int = 120,
    budget: int = 512,
    kv_dtype: KvDtype = "float16",
    threads: int = 1,
    isa: str = "",
    options: EngineOptions | None = None,
) -> Iterator[Engine]:
    spec, packed = model
    layout = cache_layout(spec, kv_dtype)
    executor = NativeExecutor(spec, packed, layout, [pages], kv_dtype=kv_dtype, threads=threads, max_slots=16, isa=isa)
    try:
        yield Engine(
            executor,
            layout,
            [pages],
            context_tokens=512,
            max_step_tokens=budget,
            max_sequences=16,
            options=options or EngineOptions(),
        )
    finally:
        executor.close()


def _run(engine: Engine, *requests: EngineRequest, preempt: bool = False) -> Tokens:
    tokens: Tokens = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for sequence in list(engine._scheduler.running.values()) if preempt else ():
            engine._scheduler.preempt(sequence, 0.0)
        result = engine.step()
        assert result is not None
        engine.check()
        for output in result.outputs:
            assert output.error is None
            tokens.setdefault((output.request, output.choice), []).extend(output.tokens)
    return tokens


def _requests(greedy: bool, most: int = 50) -> list[EngineRequest]:
    """Seven prompts of 1 to 50 tokens with all log-probabilities that can be asked for; sampled ones have a seed each."""
    sampled = [SamplingParams(seed=i, temperature=1.5, top_p=0.95, min_p=0.001, **PENALISED) for i in range(7)]
    return [
        EngineRequest(
            id=i,
            prompt=[(31 * i + 7 * t + t * t) % 320 for t in range(length)],
            max_tokens=20,
            sampling=GREEDY if greedy else sampled[i],
            n=1 if greedy else 1 + i % 2,
            logprobs=5,
        )
        for i, length in enumerate([1, 3, 15, 16, 17, 33, 50])
        if length <= most
    ]


@cache
def _alone(window: int | None, greedy: bool) -> Tokens:
    """Every request by itself, whole prompt in one step."""
    tokens: Tokens = {}
    for request in _requests(greedy):
        with _engine(_tiny(window)) as engine:
            tokens |= _run(engine, request)
    return tokens


def test_greedy_alone_is_what_the_float64_oracle_says() -> None:
    for window in (None, 8):
        for request in _requests(greedy=True)[2:5]:
            with _engine(_tiny(window), kv_dtype="float32") as engine:
                found = _run(engine, request)[request.id, 0]
            assert [t.id for t in found] == oracle_greedy(tiny_rand(5, window=window), request.prompt, request.max_tokens)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 16, 512])
def test_in_a_batch_in_any_chunks_and_any_order(window: int | None, greedy: bool, budget: int) -> None:
    for requests in (_requests(greedy), _requests(greedy)[::-1]):
        with _engine(_tiny(window), budget=budget) as engine:
            assert _run(engine, *requests) == _alone(window, greedy)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("greedy", [True, False])
def test_preempted(window: int | None, greedy: bool) -> None:
    with _engine(_tiny(window), pages=6) as engine:
        assert _run(engine, *_requests(greedy)) == _alone(window, greedy)
    with _engine(_tiny(window)) as engine:
        assert _run(engine, *_requests(greedy), preempt=True) == _alone(window, greedy)
        assert engine.stats.preemptions > 100


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("budget", [7, 512])
def test_from_a_warm_prefix(window: int | None, budget: int) -> None:
    with _engine(_tiny(window), budget=budget) as engine:
        for round_ in range(3):
            again = [msgspec.structs.replace(request, id=100 * round_ + request.id) for request in _requests(greedy=False)]
            found = _run(engine, *again)
            assert {(key % 100, choice): tokens for (key, choice), tokens in found.items()} == _alone(window, greedy=False)
        assert engine.stats.hit_tokens >= 2 * sum(len(request.prompt) - 1 for request in _requests(greedy=False))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_on_any_number_of_threads_and_every_instruction_set(window: int | None, kv_dtype: KvDtype) -> None:
    requests, seen = _requests(greedy=False), []
    for isa in load().isas:
        for threads in (1, 2, 5):
            with _engine(_tiny(window), kv_dtype=kv_dtype, threads=threads, isa=isa) as engine:
                seen.append(_run(engine, *requests))
    assert all(tokens == seen[0] for tokens in seen)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_prompts_that_begin_alike_share_and_change_nothing(kv_dtype: KvDtype) -> None:
    start = [(3 * t + t * t) % 320 for t in range(60)]
    requests = [
        EngineRequest(
            id=i,
            prompt=[*start[:shared], 300 + i],
            max_tokens=20,
            n=2,
            logprobs=3,
            sampling=SamplingParams(seed=i, temperature=1.2),
        )
        for i, shared in enumerate([60, 60, 33, 17, 48, 5])
    ]
    alone: Tokens = {}
    for request in requests:
        with _engine(_tiny(None), kv_dtype=kv_dtype, options=EngineOptions(prefix_cache=False)) as engine:
            alone |= _run(engine, request)
    with _engine(_tiny(None), kv_dtype=kv_dtype, budget=24) as engine:
        assert _run(engine, *requests) == alone
        assert engine.stats.hit_tokens > 150


@pytest.fixture(scope="module")
def real(real_model_path: Path) -> tuple[Any, PackedFile]:
    return _packed(str(real_model_path), "gguf")


def test_the_real_model_alone_in_company_in_chunks_warm_and_on_more_threads(real: tuple[Any, PackedFile]) -> None:
    prompts = [[(17 * i + 31 * t + t * t) % 49_000 + 20 for t in range(length)] for i, length in enumerate([5, 40, 150, 33])]
    sampling = [GREEDY, SamplingParams(seed=3, temperature=0.8, top_p=0.9), GREEDY, SamplingParams(seed=4, top_k=40)]
    requests = [EngineRequest(id=i, prompt=p, max_tokens=12, sampling=sampling[i], logprobs=5) for i, p in enumerate(prompts)]
    alone: Tokens = {}
    for request in requests:
        with _engine(real, threads=2) as engine:
            alone |= _run(engine, request)
    for changes in ({"threads": 1}, {"threads": 3}, {"budget": 7, "threads": 2}, {"pages": 16, "threads": 2}):
        with _engine(real, **changes) as engine:
            assert _run(engine, *requests) == alone
            again = [msgspec.structs.replace(request, id=10 + request.id) for request in requests]
            assert {(key - 10, choice): tokens for (key, choice), tokens in _run(engine, *again).items()} == alone


def test_the_real_model_is_the_same_on_every_vector_instruction_set(real: tuple[Any, PackedFile]) -> None:
    request = EngineRequest(id=1, prompt=[(7 * t) % 40_000 + 20 for t in range(90)], max_tokens=8, sampling=GREEDY, logprobs=5)
    seen = []
    for isa in (isa for isa in load().isas if isa != "scalar"):
        with _engine(real, isa=isa, threads=2) as engine:
            seen.append(_run(engine, request))
    assert all(tokens == seen[0] for tokens in seen)
