"""Speculation changes no token and no log-probability: every shape of draft, right and wrong, against the answers without.

To the bit on the native backend, whatever the type of the cache, the window, the company, the chunks; token-exact in float64 on
the reference. Greedy and sampled: the draws are those of plain decoding, so that a seed gives the same text either way.
"""

from __future__ import annotations

from functools import cache

import pytest

from engine.built import EngineOptions
from engine.cache.layout import KvDtype
from engine.kernels.cpu.lib import load
from engine.types import EngineRequest, SequenceOutput, TokenOutput
from tests.engine import test_metamorphic as reference
from tests.engine.test_native_metamorphic import GREEDY, WINDOWS, Tokens, _alone, _engine, _requests, _run, _tiny
from tests.fixtures.seer import SHAPES, Eager, Shape, eager, late_branch, right_chain

VOCAB = 320
KV: list[KvDtype] = ["float16", "float32", "int8"]


@cache
def _plain(window: int | None, greedy: bool, kv_dtype: KvDtype) -> Tokens:
    if kv_dtype == "float16":
        return _alone(window, greedy)
    tokens: Tokens = {}
    for request in _requests(greedy):
        with _engine(_tiny(window), kv_dtype=kv_dtype) as engine:
            tokens |= _run(engine, request)
    return tokens


def _drafting(requests: list[EngineRequest], plain: Tokens, shape: Shape, seed: int = 0) -> Eager:
    prompts = {request.id: request.prompt for request in requests}
    answers = [[*prompts[number], *(token.id for token in tokens)] for (number, _), tokens in plain.items() if number in prompts]
    return eager(answers, shape, VOCAB, seed)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize("window", WINDOWS)
def test_native_answers_are_the_same_bits(window: int | None, kv_dtype: KvDtype, greedy: bool, shape: Shape) -> None:
    plain = _plain(window, greedy, kv_dtype)
    for isa in load().isas[:1] if kv_dtype != "float16" else load().isas:
        drafting = _drafting(_requests(greedy), plain, shape)
        with _engine(_tiny(window), kv_dtype=kv_dtype, isa=isa, threads=2, options=EngineOptions(speculation=drafting)) as engine:
            assert _run(engine, *_requests(greedy)) == plain
            assert engine.stats.drafted_tokens == drafting.counts.drafted > 50
            assert drafting.counts.accepted > 20


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("budget", [5, 16])
def test_native_alone_in_small_steps_and_preempted(window: int | None, budget: int, shape: Shape) -> None:
    for greedy in (True, False):
        plain = _alone(window, greedy)
        for number, request in enumerate(_requests(greedy)):
            options = EngineOptions(speculation=_drafting([request], plain, shape, number))
            with _engine(_tiny(window), budget=budget, options=options) as engine:
                found = _run(engine, request, preempt=number % 3 == 2)
            assert found == {key: tokens for key, tokens in plain.items() if key[0] == request.id}


def test_a_request_may_go_without() -> None:
    plain = _alone(None, True)
    requests = [EngineRequest(**{**_fields(r), "speculation": r.id % 2 == 0}) for r in _requests(True)]
    drafting = _drafting(requests, plain, SHAPES[0])
    with _engine(_tiny(None), options=EngineOptions(speculation=drafting)) as engine:
        for request in requests:
            engine.add(request)
        usages = {}
        while engine.has_work:
            result = engine.step()
            assert result is not None
            usages |= {output.request: output.usage for output in result.outputs if output.usage}
    assert all((usage.drafted_tokens > 0) == (number % 2 == 0) for number, usage in usages.items())
    assert all(usage.output_tokens == 20 for usage in usages.values())


def _fields(request: EngineRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


# --- the reference, in float64 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_reference_answers_are_the_same_tokens(window: int | None, greedy: bool, shape: Shape) -> None:
    requests, plain = reference._requests(reference.GREEDY if greedy else None), reference._alone(window, greedy)
    prompts = {request.id: request.prompt for request in requests}
    drafting = eager([[*prompts[number], *tokens] for (number, _), tokens in plain.items()], shape, VOCAB)
    engine = reference._engine(window, options=EngineOptions(speculation=drafting))
    assert reference._run(engine, *requests) == plain
    assert drafting.counts.drafted > 50 and drafting.counts.accepted > 20


# --- ends in the middle of what was accepted --------------------------------------------------------------------------------------

LONG = EngineRequest(id=0, prompt=[(7 * t + t * t) % 320 for t in range(33)], max_tokens=20, sampling=GREEDY, logprobs=2)


def _ends(request: EngineRequest, shape: Shape | None) -> tuple[list[SequenceOutput], list[TokenOutput]]:
    """The last output, and all tokens; check() after every step."""
    drafting = _drafting([LONG], {(0, 0): plain_answer()}, shape) if shape else None
    options = EngineOptions(speculation=drafting)
    with _engine(_tiny(None), options=options) as engine:
        engine.add(request)
        tokens: list[TokenOutput] = []
        last: list[SequenceOutput] = []
        while engine.has_work:
            result = engine.step()
            assert result is not None
            engine.check()
            for output in result.outputs:
                tokens += output.tokens
                last = [output]
        again = _run(engine, EngineRequest(**{**_fields(LONG), "id": 9}))
        assert again[9, 0] == plain_answer(), "what was cached of a text that ended early is wrong"
    return last, tokens


@cache
def plain_answer() -> list[TokenOutput]:
    with _engine(_tiny(None)) as engine:
        return _run(engine, LONG)[0, 0]


@pytest.mark.parametrize("shape", [right_chain, late_branch], ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("at", range(1, 19))
def test_a_stop_id_or_the_limit_in_mid_run(at: int, shape: Shape) -> None:
    ids = [token.id for token in plain_answer()]
    accepted = 0
    for changes in (
        {"stop_ids": [ids[at]]},
        {"max_tokens": at},
        {"stop_ids": [ids[at]], "min_tokens": at + 2},
        {"stop_ids": ids[at : at + 3], "max_tokens": at + 2},
    ):
        request = EngineRequest(**{**_fields(LONG), **changes})
        (mine,), tokens = _ends(request, shape)
        (plain,), expected = _ends(request, None)
        assert tokens == expected
        assert (mine.finish, mine.stop_id) == (plain.finish, plain.stop_id)
        assert mine.usage is not None and plain.usage is not None
        assert mine.usage.output_tokens == plain.usage.output_tokens == len(expected)
        accepted += mine.usage.accepted_tokens
    assert accepted or at == 1


def test_aborted_at_every_step_and_in_a_pool_that_is_full() -> None:
    plain = _alone(None, True)
    requests = _requests(True)
    for number in range(1, 8):
        options = EngineOptions(speculation=_drafting(requests, plain, late_branch, number))
        with _engine(_tiny(None), pages=9, options=options) as engine:
            for request in requests:
                engine.add(request)
            for _ in range(number):
                engine.step()
                engine.check()
            engine.abort(requests[number - 1].id)
            engine.check()
            found = _run(engine)
            assert engine.stats.pages_used == 0
        for key, tokens in found.items():
            assert tokens == plain[key][len(plain[key]) - len(tokens) :]
