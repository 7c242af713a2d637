"""Models that keep a state, end to end: prefix hits at snapshots, forks, chunks, batches, preemption, growth; tokens as recomputed.

A recurrence alone, beside full attention, and beside a window: the cache then has a state group alone, or two kinds of groups that
must serve a prefix together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from engine.built import EngineOptions
from engine.cache.layout import cache_layout
from engine.engine import Engine
from engine.kernels.reference import ReferenceOps
from engine.runtime.torch_executor import TorchExecutor
from engine.types import EngineRequest, SamplingParams
from tests.fixtures.tiny_recurrent import VOCAB, Kind, TinyRecurrent, tiny_recurrent

Tokens = dict[tuple[int, int], list[int]]
MODELS: list[tuple[Kind, ...]] = [("recurrence", "recurrence"), ("full", "recurrence"), ("recurrence", "20", "recurrence")]
GREEDY = SamplingParams(temperature=0.0)

each_model = pytest.mark.parametrize("kinds", MODELS, ids=["recurrence", "full", "window"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def _model(kinds: tuple[Kind, ...]) -> TinyRecurrent:
    return tiny_recurrent(*kinds, seed=4)


def _engine(
    kinds: tuple[Kind, ...],
    *,
    pages: int = 60,
    states: int = 20,
    budget: int = 256,
    options: EngineOptions | None = None,
    ops: ReferenceOps | None = None,
) -> Engine:
    model = _model(kinds)
    layout = cache_layout(model.spec, "float64")
    counts = [states if group.kind == "state" else pages for group in layout.groups]
    executor = TorchExecutor(model.spec, model.weights, layout, counts, dtype="float64", kv_dtype="float64", max_slots=8, ops=ops)
    return Engine(
        executor,
        layout,
        counts,
        context_tokens=512,
        max_step_tokens=budget,
        max_sequences=8,
        options=options or EngineOptions(),
    )


def _run(engine: Engine, *requests: EngineRequest, preempt: bool = False) -> tuple[Tokens, dict[int, int]]:
    """Tokens, and how many prompt tokens the first choice of each request found in the cache."""
    tokens: Tokens = {}
    cached: dict[int, int] = {}
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
            tokens.setdefault((output.request, output.choice), []).extend(token.id for token in output.tokens)
            if output.usage and output.choice == 0:
                cached[output.request] = output.usage.cached_tokens
    return tokens, cached


def _prompt(number: int, length: int) -> list[int]:
    return [(31 * number + 7 * t + t * t) % VOCAB for t in range(length)]


def _requests(*, sampled: bool = False) -> list[EngineRequest]:
    return [
        EngineRequest(
            id=i,
            prompt=_prompt(i, length),
            max_tokens=20,
            sampling=SamplingParams(seed=i, temperature=1.3, top_p=0.9) if sampled else GREEDY,
            n=1 + i % 2 if sampled else 1,
        )
        for i, length in enumerate([1, 5, 16, 17, 33, 50])
    ]


@cache
def _alone(kinds: tuple[Kind, ...], sampled: bool) -> Tokens:
    tokens: Tokens = {}
    for request in _requests(sampled=sampled):
        tokens |= _run(_engine(kinds, options=EngineOptions(prefix_cache=False)), request)[0]
    return tokens


@each_model
def test_alone_is_what_recomputing_everything_gives(kinds: tuple[Kind, ...]) -> None:
    for request in _requests():
        assert _alone(kinds, False)[request.id, 0] == _model(kinds).greedy(request.prompt, 20)


@each_model
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 16, 256])
def test_in_a_batch_in_any_chunks_cold_and_warm(kinds: tuple[Kind, ...], sampled: bool, budget: int) -> None:
    engine, requests = _engine(kinds, budget=budget), _requests(sampled=sampled)
    assert _run(engine, *requests)[0] == _alone(kinds, sampled)
    assert _run(engine, *requests)[0] == _alone(kinds, sampled)
    assert engine.stats.hit_tokens > 0


@each_model
@pytest.mark.parametrize("sampled", [False, True])
def test_preempted_at_every_step(kinds: tuple[Kind, ...], sampled: bool) -> None:
    engine = _engine(kinds)
    assert _run(engine, *_requests(sampled=sampled), preempt=True)[0] == _alone(kinds, sampled)
    assert engine.stats.preemptions > 50


@each_model
@pytest.mark.parametrize(("pages", "states"), [(6, 3), (6, 1), (9, 2)])
def test_in_a_pool_that_is_too_small(kinds: tuple[Kind, ...], pages: int, states: int) -> None:
    assert _run(_engine(kinds, pages=pages, states=states), *_requests(sampled=True))[0] == _alone(kinds, True)


@each_model
def test_the_same_prompt_starts_at_the_snapshot_of_its_last_page_end(kinds: tuple[Kind, ...]) -> None:
    engine = _engine(kinds)
    prompt = _prompt(9, 50)
    expected = _model(kinds).greedy(prompt, 8)
    for number in range(3):
        tokens, cached = _run(engine, EngineRequest(id=number, prompt=prompt, max_tokens=8, sampling=GREEDY))
        assert tokens[number, 0] == expected and cached[number] == (48 if number else 0)


@each_model
def test_the_next_turn_starts_where_the_last_one_ended(kinds: tuple[Kind, ...]) -> None:
    engine = _engine(kinds)
    prompt, known = _prompt(3, 21), 0
    for number in range(4):
        tokens, cached = _run(engine, EngineRequest(id=number, prompt=prompt, max_tokens=9, sampling=GREEDY))
        assert tokens[number, 0] == _model(kinds).greedy(prompt, 9)
        assert cached[number] == known
        known = len(prompt) + 8
        prompt = [*prompt, *tokens[number, 0], 7, 8, 9]


@each_model
def test_prompts_that_part_share_up_to_the_page_end_before(kinds: tuple[Kind, ...]) -> None:
    """The first to part finds nothing there, and leaves a snapshot for the next."""
    engine, start = _engine(kinds), _prompt(1, 70)
    hits = []
    for number in range(3):
        prompt = [*start, *_prompt(20 + number, 30)]
        tokens, cached = _run(engine, EngineRequest(id=number, prompt=prompt, max_tokens=6, sampling=GREEDY))
        assert tokens[number, 0] == _model(kinds).greedy(prompt, 6)
        hits.append(cached[number])
    assert hits == [0, 0, 64]


@each_model
def test_samples_of_one_prompt_start_from_one_snapshot(kinds: tuple[Kind, ...]) -> None:
    engine = _engine(kinds)
    request = EngineRequest(id=0, prompt=_prompt(2, 40), max_tokens=10, n=4, sampling=SamplingParams(seed=8, temperature=1.5))
    alone = _run(_engine(kinds, options=EngineOptions(prefix_cache=False)), request)[0]
    assert _run(engine, request)[0] == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 4
    assert engine.stats.hit_tokens == 3 * 32


class _Unreliable(ReferenceOps):
    """Every third step of several sampled rows fails at its end, when keys and values are written; a sequence may be poisoned."""

    steps = 0
    poisoned = False

    def finite(self, logits: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if len(logits) > 1:
            self.steps += 1
            if self.steps % 3 == 0:
                raise RuntimeError("this step fails")
        return super().finite(logits) & (not self.poisoned)


@each_model
@pytest.mark.parametrize("sampled", [False, True])
def test_steps_that_fail_and_are_tried_again_in_halves(kinds: tuple[Kind, ...], sampled: bool) -> None:
    ops = _Unreliable()
    assert _run(_engine(kinds, ops=ops), *_requests(sampled=sampled))[0] == _alone(kinds, sampled)
    assert ops.steps > 30


@each_model
def test_nothing_of_a_sequence_that_failed_is_shared(kinds: tuple[Kind, ...]) -> None:
    ops = _Unreliable()
    engine, prompt = _engine(kinds, ops=ops), _prompt(6, 50)
    engine.add(EngineRequest(id=1, prompt=prompt, max_tokens=9, sampling=GREEDY))
    for _ in range(3):
        engine.step()
    ops.poisoned = True
    result = engine.step()
    assert result is not None and result.outputs[0].finish == "error"
    ops.poisoned = False
    engine.check()
    assert engine.stats.pages_used == engine.stats.pages_cached == 0
    tokens, cached = _run(engine, EngineRequest(id=2, prompt=prompt, max_tokens=9, sampling=GREEDY))
    assert tokens[2, 0] == _model(kinds).greedy(prompt, 9) and cached[2] == 0


@each_model
def test_it_grows_in_the_middle(kinds: tuple[Kind, ...]) -> None:
    engine = _engine(kinds, pages=12, states=4)
    requests = _requests()[3:]
    tokens: Tokens = {}
    for request in requests:
        engine.add(request)
    for _ in range(7):
        result = engine.step()
        assert result is not None
        for output in result.outputs:
            tokens.setdefault((output.request, output.choice), []).extend(token.id for token in output.tokens)
    layout = cache_layout(_model(kinds).spec, "float64")
    engine.grow(900, [30 if group.kind == "state" else 80 for group in layout.groups])
    for key, more in _run(engine)[0].items():
        tokens.setdefault(key, []).extend(more)
    assert tokens == {(request.id, 0): _alone(kinds, False)[request.id, 0] for request in requests}
