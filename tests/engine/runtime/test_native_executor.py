"""The native executor's contract: slots, copies, growth, poisoned pages, bad logits, masks, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.layout import KvDtype, cache_layout
from engine.errors import InvalidRequest, OutOfMemory
from engine.models.families import family_for
from engine.models.spec import NormSpec, RecurrenceSpec
from engine.runtime.batch import FROM_PREVIOUS, Row, RowOutput, SamplingSlot, StepInputs
from engine.runtime.native_executor import NativeExecutor
from engine.runtime.native_plan import unsupported
from engine.types import SamplingParams
from engine.weights.packed import PackedFile, open_or_pack
from engine.weights.source import open_source
from tests.engine.runtime.test_torch_executor import REFUSED
from tests.fixtures.tiny_rand import TinyRand, oracle_greedy, tiny_rand

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * t + t * t) % 320 for t in range(21)]
PAGES = list(range(4))


def _packed(model: TinyRand, folder: Path) -> tuple[Any, PackedFile]:
    source = open_source(str(model.save(folder)), "safetensors")
    try:
        family = family_for(source.info.architecture)
        spec = family.spec(source.info.config, 512)
        return spec, open_or_pack(source, spec, family.parameters(spec), progress=lambda stage, fraction: None)
    finally:
        source.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PackedFile]:
    return _packed(tiny_rand(3), tmp_path_factory.mktemp("tiny") / "model")


def _executor(tiny: tuple[Any, PackedFile], pages: int = 40, kv_dtype: KvDtype = "float32", threads: int = 2) -> NativeExecutor:
    spec, packed = tiny
    return NativeExecutor(spec, packed, cache_layout(spec, kv_dtype), [pages], kv_dtype=kv_dtype, threads=threads)


def _slot(slot: int = 3, prompt: list[int] = PROMPT, **fields: Any) -> SamplingSlot:
    return SamplingSlot(**{"slot": slot, "params": GREEDY, "choice": 0, "prompt": prompt, **fields})


def _row(tokens: list[int] = PROMPT, position: int = 0, sampling: int = 3, pages: list[int] = PAGES, **fields: Any) -> Row:
    return Row(sequence=1, tokens=tokens, position=position, pages=[pages], sampling=sampling, **fields)


def _step(executor: NativeExecutor, *rows: Row, **inputs: Any) -> list[RowOutput]:
    return executor.collect(executor.submit(StepInputs(step=1, rows=list(rows), **inputs))).rows


def _tokens(executor: NativeExecutor, count: int, pages: list[int] = PAGES) -> list[int]:
    """`count` greedy tokens after PROMPT, in slot 3."""
    [first] = _step(executor, _row(pages=pages), opened=[_slot()])
    found = [first.tokens[0].id]
    for i in range(count - 1):
        [output] = _step(executor, _row([FROM_PREVIOUS], len(PROMPT) + i, pages=pages))
        found.append(output.tokens[0].id)
    return found


def test_greedy_from_previous_tokens_is_what_the_oracle_says(tiny: tuple[Any, PackedFile]) -> None:
    assert _tokens(_executor(tiny), 20) == oracle_greedy(tiny_rand(3), PROMPT, 20)


def test_a_slot_that_is_opened_again_goes_on_from_what_it_is_given(tiny: tuple[Any, PackedFile]) -> None:
    executor, expected = _executor(tiny), oracle_greedy(tiny_rand(3), PROMPT, 8)
    assert _tokens(executor, 4) == expected[:4]
    whole = [*PROMPT, *expected[:4]]
    [output] = _step(executor, _row(whole, pages=[20, 21, 22, 23]), opened=[_slot(output=expected[:4])], closed=[3])
    assert output.tokens[0].id == expected[4]
    [output] = _step(executor, _row([FROM_PREVIOUS], len(whole), pages=[20, 21, 22, 23]))
    assert output.tokens[0].id == expected[5]


def test_copies_are_done_before_the_step_and_leave_their_source(tiny: tuple[Any, PackedFile]) -> None:
    executor = _executor(tiny)
    expected = _tokens(executor, 6)
    for target, row in ((30, [30, 31]), (32, [32, 33])):
        copies = [(0, PAGES[0], target), (0, PAGES[1], target + 1)]
        [output] = _step(executor, _row(PROMPT[-1:], len(PROMPT) - 1, pages=row, sampling=4), copies=copies, opened=[_slot(4)])
        assert output.tokens[0].id == expected[0]


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_a_sequence_goes_on_to_the_bit_after_growth(tiny: tuple[Any, PackedFile], kv_dtype: KvDtype) -> None:
    found = []
    for grows in (False, True):
        executor = _executor(tiny, kv_dtype=kv_dtype)
        _tokens(executor, 3)
        if grows:
            executor.grow([400], [PAGES])
        executor.keep_logits()
        _step(executor, _row([5], len(PROMPT) + 3, sampling=-1, pages=[*PAGES[:2], 399 if grows else 39]))
        found.append(executor.logits())
    assert found[0] == found[1] and len(found[0]) == 4 * 320


def test_growth_that_no_memory_is_there_for_changes_nothing(tiny: tuple[Any, PackedFile]) -> None:
    executor = _executor(tiny)
    expected = _tokens(executor, 3)
    with pytest.raises(OutOfMemory):
        executor.grow([(1 << 31) - 1], [PAGES])
    with pytest.raises(InvalidRequest, match="smaller"):
        executor.grow([20], [PAGES])
    with pytest.raises(InvalidRequest, match="outside"):
        executor.grow([400], [[40]])
    assert _tokens(executor, 3) == expected


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_what_lies_in_pages_beyond_a_rows_tokens_does_not_matter(tiny: tuple[Any, PackedFile], kv_dtype: KvDtype) -> None:
    """Pages full of what a row of NaN left behind; its own row says that its logits are no numbers, and others are fine."""
    executor = _executor(tiny, kv_dtype=kv_dtype)
    clean = _tokens(executor, 6)
    spec, packed = _poisoned(tiny)
    bad = NativeExecutor(spec, packed, cache_layout(spec, kv_dtype), [40], kv_dtype=kv_dtype)
    poison, good = _row([300] * 60, pages=PAGES, sampling=5), _row(pages=[10, 11, 12], sampling=3)
    outputs = _step(bad, poison, good, opened=[_slot(5, [300] * 60), _slot()])
    assert outputs[0].error and not outputs[0].tokens and outputs[1].tokens[0].id == clean[0]
    assert _tokens(bad, 6) == clean


def _poisoned(tiny: tuple[Any, PackedFile]) -> tuple[Any, Any]:
    """The same weights with an embedding of NaN for token 300, which the prompt does not have."""
    spec, packed = tiny
    assert 300 not in PROMPT
    data, place = bytearray(packed.data), packed.tensors["embed"]
    panel = place.offset + 300 // 16 * place.columns * 64
    for column in range(place.columns):
        at = panel + column * 64 + 300 % 16 * 4
        data[at : at + 4] = b"\x00\x00\xc0\x7f"
    return spec, _Copy(packed.tensors, data)


class _Copy:
    def __init__(self, tensors: Any, data: bytearray) -> None:
        self.tensors, self.data = tensors, data


def test_a_mask_leaves_what_it_allows(tiny: tuple[Any, PackedFile]) -> None:
    executor = _executor(tiny)
    free = _tokens(executor, 1)[0]
    for allowed in ([17, 200], [319]):
        bits = bytearray(40)
        for token in allowed:
            bits[token // 8] |= 1 << token % 8
        [output] = _step(executor, _row(mask=bytes(bits)), opened=[_slot()])
        assert output.tokens[0].id in allowed and free not in allowed
    [output] = _step(executor, _row(mask=bytes(40)), opened=[_slot()])
    assert output.error and not output.tokens


def test_log_probabilities_are_those_of_the_kept_logits(tiny: tuple[Any, PackedFile]) -> None:
    executor = _executor(tiny)
    executor.keep_logits()
    [output] = _step(executor, _row(), opened=[_slot(logprobs=4)])
    logits = torch.frombuffer(bytearray(executor.logits()), dtype=torch.float32).view(len(PROMPT), -1)
    expected = logits[-1].double().log_softmax(-1)
    best = expected.topk(4)
    [token] = output.tokens
    assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-12)
    assert [i for i, _ in token.top] == best.indices.tolist()
    assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-12)


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_inputs_are_refused_and_change_nothing(tiny: tuple[Any, PackedFile], case: str) -> None:
    executor = _executor(tiny, pages=256)
    expected = oracle_greedy(tiny_rand(3), PROMPT, 6)
    assert _tokens(executor, 3) == expected[:3]
    row = {"sequence": 5, "tokens": [1, 2, 3], "position": 0, "pages": [[20, 21]], "sampling": 7} | REFUSED[case][0]
    inputs = {"step": 2, "rows": [Row(**row)], "opened": [_slot(7, [1, 2, 3])]} | REFUSED[case][1]
    with pytest.raises(InvalidRequest):
        executor.submit(StepInputs(**inputs))
    for i in (2, 3, 4):
        [output] = _step(executor, _row([FROM_PREVIOUS], len(PROMPT) + i))
        assert output.tokens[0].id == expected[i + 1]


def test_a_slot_that_was_closed_is_closed(tiny: tuple[Any, PackedFile]) -> None:
    executor = _executor(tiny)
    _tokens(executor, 2)
    _step(executor, closed=[3])
    with pytest.raises(InvalidRequest, match="not open"):
        _step(executor, _row([4], len(PROMPT) + 1))


def test_a_plan_and_a_packed_file_that_do_not_belong_together_are_refused(tiny: tuple[Any, PackedFile], tmp_path: Path) -> None:
    spec, packed = tiny
    other = replace(spec, hidden=spec.hidden * 2)
    with pytest.raises(InvalidRequest, match="kind or shape"):
        NativeExecutor(other, packed, cache_layout(other, "float32"), [4], kv_dtype="float32")
    with pytest.raises(InvalidRequest, match="instruction set"):
        NativeExecutor(spec, packed, cache_layout(spec, "float32"), [4], kv_dtype="float32", isa="altivec")
    with pytest.raises(OutOfMemory):
        NativeExecutor(spec, packed, cache_layout(spec, "float32"), [(1 << 31) - 1], kv_dtype="float32")


def test_what_falls_to_the_reference_is_listed(tiny: tuple[Any, PackedFile]) -> None:
    spec, _ = tiny
    layer = spec.layers[0]
    changed = {
        "layer norms": replace(layer, ffn_norm=NormSpec(1e-5, kind="layer")),
        "norms behind a layer": replace(layer, mixer_post_norm=NormSpec(1e-5)),
        "norms of queries and keys": replace(layer, mixer=replace(layer.mixer, qk_norm=NormSpec(1e-5))),
        "capped attention scores": replace(layer, mixer=replace(layer.mixer, softcap=30.0)),
        "recurrent layers": replace(layer, mixer=RecurrenceSpec(8)),
    }
    assert unsupported(spec, "float16") == []
    for reason, other in changed.items():
        assert unsupported(replace(spec, layers=(layer, other)), "float16") == [reason]
    assert unsupported(replace(spec, logit_softcap=30.0), "bfloat16") == ["capped logits", "a cache of bfloat16"]
