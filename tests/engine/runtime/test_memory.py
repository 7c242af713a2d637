"""What a load is planned to take, against naive sums, and what is refused before anything is allocated."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.cache.layout import cache_layout
from engine.errors import OutOfMemory
from engine.models.families import family_for
from engine.models.spec import ModelSpec, ParameterInfo, RecurrenceSpec
from engine.runtime.memory import (
    FULL_CONTEXTS,
    MemoryPlan,
    plan_growth,
    plan_memory,
    reference_needs,
    weight_bytes,
    workspace_bytes,
)
from engine.types import WorkerConfig
from tests.fixtures.tiny_rand import TinyRand, tiny_rand
from tests.fixtures.tiny_recurrent import STATE, TinyRecurrent, tiny_recurrent

CONFIG = WorkerConfig(
    model_path="", format="safetensors", kv_dtype="float32", context_tokens=256, max_step_tokens=32, max_sequences=8
)
PAGE = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, kv heads, head dim, float32


def _plan(available: int, config: WorkerConfig = CONFIG, model: TinyRand | None = None) -> MemoryPlan:
    model = model or tiny_rand()
    family = family_for(model.config["model_type"])
    spec = family.spec(model.config, config.context_tokens)
    layout = cache_layout(spec, config.kv_dtype)
    return plan_memory(
        reference_needs(spec, family.parameters(spec), model.tensors, config), layout, config=config, available_bytes=available
    )


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_tensor_by_tensor(tied: bool) -> None:
    model = tiny_rand(tied=tied)
    family = family_for("llama")
    spec = family.spec(model.config, 256)
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        expected = sum(t.numel() for t in model.tensors.values()) * size
        assert weight_bytes(family.parameters(spec), model.tensors, dtype) == expected


def test_workspace_grows_with_the_step_and_holds_the_largest_tensor() -> None:
    model = tiny_rand()
    family = family_for("llama")
    spec = family.spec(model.config, 256)
    sizes = [
        workspace_bytes(spec, family.parameters(spec), msgspec.structs.replace(CONFIG, max_step_tokens=n)) for n in (1, 32, 512)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2]
    assert sizes[0] >= max(math.prod(t.shape) for t in model.tensors.values()) * 8


def test_plenty_of_memory_gives_some_full_contexts() -> None:
    plan = _plan(1 << 40)
    assert plan.pages == (FULL_CONTEXTS * 256 // 16,)
    assert plan.kv_bytes == plan.pages[0] * PAGE


def test_no_more_pages_than_the_sequences_can_use() -> None:
    assert _plan(1 << 40, msgspec.structs.replace(CONFIG, max_sequences=2)).pages == (2 * 256 // 16,)


def test_scarce_memory_gives_at_least_one_context_or_is_refused_with_both_numbers() -> None:
    plan = _plan(1 << 40)
    least = plan.weight_bytes + plan.workspace_bytes + 16 * PAGE
    assert _plan(least).pages == (16,)
    with pytest.raises(OutOfMemory) as caught:
        _plan(least - 1)
    needed, available = re.findall(r"([\d.]+) GB of memory .* and ([\d.]+) GB are available", caught.value.message)[0]
    assert float(needed) == pytest.approx(least / 1e9, abs=0.005) and float(available) == pytest.approx(least / 1e9, abs=0.005)


def test_a_cache_size_asked_for_is_kept_even_below_one_context() -> None:
    assert _plan(1 << 40, msgspec.structs.replace(CONFIG, kv_memory_bytes=6 * PAGE + 5)).pages == (6,)


def test_a_cache_size_that_is_not_there_or_holds_no_page_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="available"):
        _plan(1 << 30, msgspec.structs.replace(CONFIG, kv_memory_bytes=1 << 31))
    with pytest.raises(OutOfMemory, match=f"takes {PAGE}"):
        _plan(1 << 40, msgspec.structs.replace(CONFIG, kv_memory_bytes=PAGE - 1))


def _recurrent_parameters(model: TinyRecurrent) -> dict[str, ParameterInfo]:
    return {name: ParameterInfo((name,), tuple(weight.shape)) for name, weight in model.weights.items()}


def _plan_recurrent(model: TinyRecurrent, available: int, config: WorkerConfig = CONFIG) -> MemoryPlan:
    layout = cache_layout(model.spec, config.kv_dtype)
    parameters = _recurrent_parameters(model)
    return plan_memory(
        reference_needs(model.spec, parameters, parameters, config), layout, config=config, available_bytes=available
    )


def test_states_alone_are_enough_for_all_sequences_and_as_many_prefixes() -> None:
    plan = _plan_recurrent(tiny_recurrent("recurrence", "recurrence"), 1 << 40)
    assert plan.pages == (2 * 8,)
    assert plan.kv_bytes == 16 * 2 * STATE * 4


def test_states_beside_pages_come_on_top_of_some_full_contexts() -> None:
    plan = _plan_recurrent(tiny_recurrent("full", "recurrence"), 1 << 40)
    assert plan.pages[0] >= FULL_CONTEXTS * 16 and plan.pages[1] == 2 * 8


def test_one_state_is_the_least() -> None:
    model = tiny_recurrent("recurrence")
    plan = _plan_recurrent(model, 1 << 40)
    least = plan.weight_bytes + plan.workspace_bytes + STATE * 4
    assert _plan_recurrent(model, least).pages == (1,)
    with pytest.raises(OutOfMemory):
        _plan_recurrent(model, least - 1)


def test_the_work_of_a_recurrence_grows_with_its_state_and_not_with_the_context() -> None:
    model = tiny_recurrent("recurrence")
    wide = replace(model.spec, layers=(replace(model.spec.layers[0], mixer=RecurrenceSpec(5000)),))

    def work(spec: ModelSpec, context: int) -> int:
        return workspace_bytes(spec, _recurrent_parameters(model), msgspec.structs.replace(CONFIG, context_tokens=context))

    assert work(wide, 256) > work(model.spec, 256) and work(wide, 256) >= 32 * 3 * 5000 * 4
    assert work(wide, 256) == work(wide, 100_000)


# --- growth ----------------------------------------------------------------------------------------------------------------------


def _grown(present: MemoryPlan, context: int, available: int, *, held: int = 0, **fields: Any) -> MemoryPlan:
    model = tiny_rand(context_tokens=1 << 16)
    family = family_for("llama")
    spec = family.spec(model.config, context)
    config = msgspec.structs.replace(CONFIG, context_tokens=context, **fields)
    layout = cache_layout(spec, config.kv_dtype)
    work = workspace_bytes(spec, family.parameters(spec), config)
    return plan_growth(work, layout, present, config=config, held_bytes=held, available_bytes=available)


def test_growth_with_plenty_is_what_a_load_would_plan() -> None:
    present = _plan(1 << 40)
    longer = msgspec.structs.replace(CONFIG, context_tokens=1024)
    assert _grown(present, 1024, 1 << 40) == _plan(1 << 40, longer, tiny_rand(context_tokens=1 << 16))


@pytest.mark.parametrize("held", [0, 16 * PAGE, 64 * PAGE])
def test_growth_needs_one_context_and_the_work_beside_what_is_filled(held: int) -> None:
    present = _plan(1 << 40)
    assert present.pages == (64,)
    least = 256 * PAGE + _grown(present, 4096, 1 << 40).workspace_bytes - held
    assert _grown(present, 4096, least, held=held).pages == (256,)
    with pytest.raises(OutOfMemory, match="4096 tokens needs"):
        _grown(present, 4096, least - 1, held=held)


def test_growth_never_takes_pages_away() -> None:
    present = replace(_plan(1 << 40), pages=(1000,), kv_bytes=1000 * PAGE)
    assert _grown(present, 512, 1 << 40).pages == (1000,)


def test_growth_keeps_to_the_grant() -> None:
    present = _plan(1 << 40)
    workspace = _grown(present, 4096, 1 << 40).workspace_bytes
    grant = present.weight_bytes + workspace + 256 * PAGE
    assert _grown(present, 4096, 1 << 40, memory_bytes=grant).pages == (256,)
    with pytest.raises(OutOfMemory):
        _grown(present, 4096, 1 << 40, memory_bytes=grant - 1)


def test_growth_names_the_group_that_is_short_of_pages() -> None:
    model = tiny_recurrent("full", "20")
    present = MemoryPlan(0, 0, (10, 3), 0)
    config = msgspec.structs.replace(CONFIG, context_tokens=256, kv_memory_bytes=1 << 20)
    with pytest.raises(OutOfMemory, match=r"256 tokens needs 16 cache pages and there are 10$"):
        plan_growth(0, cache_layout(model.spec, "float32"), present, config=config, held_bytes=0, available_bytes=1 << 40)


def test_a_window_model_needs_only_its_window() -> None:
    assert max(_plan(1 << 40, model=tiny_rand(window=32)).pages) < max(_plan(1 << 40).pages)
