"""What a load is planned to take, against naive sums, and what is refused before anything is allocated."""

from __future__ import annotations

import math
import re

import msgspec
import pytest

from engine.cache.layout import cache_layout
from engine.errors import OutOfMemory
from engine.models.families import family_for
from engine.runtime.memory import FULL_CONTEXTS, MemoryPlan, plan_memory, weight_bytes, workspace_bytes
from engine.types import WorkerConfig
from tests.fixtures.tiny_rand import TinyRand, tiny_rand

CONFIG = WorkerConfig(model_path="", format="safetensors", context_tokens=256, max_step_tokens=32, max_sequences=8)
PAGE = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, kv heads, head dim, float32


def _plan(available: int, config: WorkerConfig = CONFIG, model: TinyRand | None = None) -> MemoryPlan:
    model = model or tiny_rand()
    family = family_for(model.config["model_type"])
    spec = family.spec(model.config, config.context_tokens)
    layout = cache_layout(spec, config.kv_dtype)
    return plan_memory(spec, family.parameters(spec), model.tensors, layout, config=config, available_bytes=available)


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


def test_a_window_model_needs_only_its_window() -> None:
    assert max(_plan(1 << 40, model=tiny_rand(window=32)).pages) < max(_plan(1 << 40).pages)
