"""A bigger pool under a sequence in mid-life, copies of pages in every type of cache, and states that a step may not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch

from engine.cache.layout import KvDtype, Plane, cache_layout
from engine.errors import InvalidRequest
from engine.kernels.reference import ReferenceOps
from engine.runtime.batch import PAGE_TOKENS, Row, SamplingSlot, StepInputs
from engine.runtime.torch_executor import TorchExecutor
from tests.engine.runtime.harness import GREEDY, Harness, forward
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_recurrent import tiny_recurrent

KV_DTYPES: list[KvDtype] = ["float64", "float32", "float16", "bfloat16", "int8"]
PROMPT = [(11 * t + t * t) % 320 for t in range(45)]


def _harness(kv_dtype: KvDtype, **fields: Any) -> Harness:
    return Harness(tiny_rand(3), dtype="float32", kv_dtype=kv_dtype, **fields)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sequence_goes_on_to_the_bit_after_growth(kv_dtype: KvDtype) -> None:
    grown, whole = _harness(kv_dtype, total_pages=8), _harness(kv_dtype, total_pages=8)
    lines = [harness.line(PROMPT) for harness in (grown, whole)]
    for harness, line in zip((grown, whole), lines, strict=True):
        harness.step([(line, 40)])
    grown.executor.grow([20], lines[0].pages)
    grown.free[0] += range(8, 20)
    lines[1].pages = [list(lines[0].pages[0])]
    whole.free[0] = [page for page in range(8) if page not in lines[0].pages[0]]
    ends = []
    for harness, line in zip((grown, whole), lines, strict=True):
        row = harness.row(line)
        ends.append(forward(harness.executor, row))
    assert torch.equal(ends[0], ends[1])
    assert all(plane.shape[0] == 20 for planes in grown.executor._planes for plane in planes.values())


def test_only_pages_in_use_are_carried_over() -> None:
    harness = _harness("float32", total_pages=6)
    for plane in harness.executor._planes[0].values():
        plane.copy_(torch.arange(1, 7)[:, None, None, None].expand_as(plane))
    harness.executor.grow([9], [[1, 4]])
    for plane in harness.executor._planes[0].values():
        assert [int(page.flatten()[0]) for page in plane] == [0, 2, 0, 0, 5, 0, 0, 0, 0]


def test_pages_that_nobody_wrote_take_no_memory_after_growth_either() -> None:
    harness = _harness("float32", total_pages=8)
    line = harness.line(PROMPT)
    harness.step([(line, 40)])
    process = psutil.Process()
    before = process.memory_info().rss
    harness.executor.grow([200_000], line.pages)
    assert sum(plane.nbytes for plane in harness.executor._planes[0].values()) > 1 << 30
    assert process.memory_info().rss - before < 32 << 20


class _ShortOfMemory(ReferenceOps):
    """Has memory for so many planes."""

    planes = 1000

    def allocate_plane(self, pages: int, plane: Plane, page_slots: int = PAGE_TOKENS) -> torch.Tensor:
        self.planes -= 1
        if self.planes < 0:
            raise MemoryError
        return super().allocate_plane(pages, plane, page_slots)


@pytest.mark.parametrize("planes", [0, 1, 3])
def test_without_memory_all_is_as_it_was(planes: int) -> None:
    ops = _ShortOfMemory()
    harness = _harness("float32", total_pages=8, options={"ops": ops})
    line = harness.line(PROMPT)
    harness.step([(line, 40)])
    ops.planes = planes
    with pytest.raises(MemoryError):
        harness.executor.grow([20], line.pages)
    expected = Harness(tiny_rand(3), dtype="float32").generate(PROMPT, 5)
    while len(line.tokens) < len(PROMPT) + 5:
        harness.step([(line, None)])
    assert line.tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_copied_page_is_the_same_to_the_bit_and_its_source_stays(kv_dtype: KvDtype) -> None:
    harness = _harness(kv_dtype, total_pages=8)
    line = harness.line(PROMPT)
    harness.step([(line, 40)])
    source = line.pages[0][2]
    target = next(page for page in range(8) if page not in line.pages[0])
    before = [plane.clone() for plane in harness.executor._planes[0].values()]
    harness.executor.submit(StepInputs(step=9, rows=[], copies=[(0, source, target)]))
    for old, plane in zip(before, harness.executor._planes[0].values(), strict=True):
        assert torch.equal(plane[target], old[source]) and torch.equal(plane[source], old[source])
        kept = [page for page in range(8) if page != target]
        assert torch.equal(plane[kept], old[kept])


# --- states ----------------------------------------------------------------------------------------------------------------------


def _recurrent(states: int = 4) -> TorchExecutor:
    model = tiny_recurrent("full", "recurrence")
    layout = cache_layout(model.spec, "float64")
    counts = [states if group.kind == "state" else 8 for group in layout.groups]
    return TorchExecutor(model.spec, model.weights, layout, counts, dtype="float64", kv_dtype="float64", max_slots=4)


def _row(number: int, state: Sequence[int], **fields: Any) -> Row:
    return Row(sequence=number, tokens=[5, 6, 7], position=0, pages=[[number], list(state)], **fields)


def test_states_are_copied_and_carried_over() -> None:
    executor = _recurrent()
    executor.submit(StepInputs(step=1, rows=[_row(0, [1]), _row(1, [2])]))
    plane = next(iter(executor._planes[1].values()))
    before = plane.clone()
    assert before[1].any() and before[2].any() and not before[0].any()
    executor.submit(StepInputs(step=2, rows=[], copies=[(1, 1, 3)]))
    assert torch.equal(plane[3], before[1]) and torch.equal(plane[1], before[1])
    executor.grow([8, 9], [[0, 1], [2, 3]])
    grown = next(iter(executor._planes[1].values()))
    assert torch.equal(grown[2:4], plane[2:4]) and len(grown) == 9


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([_row(0, [])], "one state"),
        ([_row(0, [0, 1])], "one state"),
        ([_row(0, [4])], "one state"),
        ([_row(0, [-1])], "one state"),
        ([_row(0, [1]), _row(1, [1])], "the same state"),
        ([_row(0, [1], tree=[-1])], "tree"),
    ],
)
def test_rows_that_cannot_have_their_state_are_refused_and_nothing_moves(rows: list[Row], says: str) -> None:
    executor = _recurrent()
    executor.submit(StepInputs(step=1, rows=[_row(0, [1])]))
    before = next(iter(executor._planes[1].values())).clone()
    with pytest.raises(InvalidRequest, match=says):
        executor.submit(StepInputs(step=2, rows=rows))
    assert torch.equal(next(iter(executor._planes[1].values())), before)


class _FailsLate(ReferenceOps):
    broken = False

    def finite(self, logits: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.broken:
            raise RuntimeError("a step that fails at its end")
        return super().finite(logits)


def test_a_step_that_fails_moves_no_state() -> None:
    model, ops = tiny_recurrent("recurrence"), _FailsLate()
    layout = cache_layout(model.spec, "float64")
    executor = TorchExecutor(model.spec, model.weights, layout, [4], dtype="float64", kv_dtype="float64", max_slots=4, ops=ops)
    slot = SamplingSlot(slot=0, params=GREEDY, choice=0, prompt=[5, 6, 7])
    row = Row(sequence=0, tokens=[5, 6, 7], position=0, pages=[[1]], sampling=0)
    first = executor.submit(StepInputs(step=1, rows=[row], opened=[slot])).rows[0].tokens
    plane = next(iter(executor._planes[0].values()))
    before = plane.clone()
    after = Row(sequence=0, tokens=[first[0].id], position=3, pages=[[1]], sampling=0)
    ops.broken = True
    with pytest.raises(RuntimeError):
        executor.submit(StepInputs(step=2, rows=[after]))
    assert torch.equal(plane, before)
    ops.broken = False
    second = executor.submit(StepInputs(step=3, rows=[after])).rows[0].tokens
    assert [first[0].id, second[0].id] == model.greedy([5, 6, 7], 2)
