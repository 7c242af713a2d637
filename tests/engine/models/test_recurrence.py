"""Recurrent layers in the decoder, alone and among attention layers, against the oracle that recomputes whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.cache.layout import KvDtype, cache_layout
from engine.runtime.batch import Row
from engine.runtime.torch_executor import ComputeDtype, TorchExecutor
from tests.engine.runtime.harness import forward
from tests.fixtures.tiny_recurrent import VOCAB, Kind, TinyRecurrent, tiny_recurrent

MODELS: list[tuple[Kind, ...]] = [("recurrence",), ("full", "recurrence"), ("recurrence", "8", "recurrence", "full")]
GIVEN = [(5 * t + t * t) % VOCAB for t in range(70)]


def _executor(model: TinyRecurrent, dtype: ComputeDtype = "float64", kv_dtype: KvDtype = "float64") -> TorchExecutor:
    """Every page and every state is NaN until it is written."""
    layout = cache_layout(model.spec, kv_dtype)
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in model.weights.items()}
    executor = TorchExecutor(model.spec, weights, layout, [6] * len(layout.groups), dtype=dtype, kv_dtype=kv_dtype)
    for plane in (plane for planes in executor._planes for plane in planes.values()):
        plane.fill_(-128 if plane.dtype == torch.int8 else torch.nan)
    return executor


def _logits(executor: TorchExecutor, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    pages = [[3] if group.kind == "state" else [1, 5, 2, 0, 4] for group in executor._layout.groups]
    rows = [Row(sequence=1, tokens=list(tokens[at : at + chunk]), position=at, pages=pages) for at in range(0, len(tokens), chunk)]
    return torch.cat([forward(executor, row) for row in rows])


@pytest.mark.parametrize("kinds", MODELS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 70])
def test_logits_equal_the_oracle_in_any_chunking(kinds: tuple[Kind, ...], biases: bool, chunk: int) -> None:
    model = tiny_recurrent(*kinds, seed=2, biases=biases)
    torch.testing.assert_close(_logits(_executor(model), GIVEN, chunk), model.logits(GIVEN), atol=1e-10, rtol=0)


def test_biases_are_not_nothing() -> None:
    plain, biased = (tiny_recurrent("recurrence", seed=2, biases=biases).logits(GIVEN) for biases in (False, True))
    assert (plain - biased).abs().max() > 0.1


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "within"),
    [("float32", "float32", 1e-4), ("float32", "float64", 1e-4), ("float32", "float16", 0.05), ("float32", "int8", 0.4)],
)
def test_narrow_types_stay_close(dtype: ComputeDtype, kv_dtype: KvDtype, within: float) -> None:
    model = tiny_recurrent("full", "recurrence", seed=2)
    got = _logits(_executor(model, dtype, kv_dtype), GIVEN, 7)
    assert (got - model.logits(GIVEN)).abs().max() < within


def test_bfloat16_weights_stay_close() -> None:
    model = tiny_recurrent("recurrence", "full", seed=2)
    got = _logits(_executor(model, "bfloat16", "bfloat16"), GIVEN, 7)
    assert got.dtype == torch.float32 and (got - model.logits(GIVEN)).abs().mean() < 0.1


@pytest.mark.parametrize("kv_dtype", ["float64", "float32", "float16", "int8"])
def test_what_a_state_costs_in_precision_does_not_grow_with_the_cuts(kv_dtype: KvDtype) -> None:
    """A state that was rounded only where a row ends would differ by more than the sums of a linear do."""
    model = tiny_recurrent("recurrence", "recurrence", seed=2)
    whole, cut = (_logits(_executor(model, "float64", kv_dtype), GIVEN, chunk) for chunk in (70, 1))
    assert (whole - cut).abs().max() < 1e-4
