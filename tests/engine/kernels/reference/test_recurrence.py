"""The recurrence against a loop over tokens, and what must not matter: cuts, neighbours, NaN elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.cache.layout import Plane
from engine.kernels.ops import RecurrenceRow
from engine.kernels.reference import ReferenceOps

OPS = ReferenceOps()
SIZE, PAGES = 5, 6
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _states(dtype: str) -> Tensor:
    plane = OPS.allocate_plane(PAGES, Plane("state", 0, dtype, (SIZE,)), 1)
    assert plane.shape == (PAGES, 1, SIZE) and not plane.any()
    return plane.copy_(torch.randn(PAGES, 1, SIZE, generator=torch.Generator().manual_seed(1)))


def _inputs(count: int, dtype: str) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(2)
    return torch.randn(count, SIZE, generator=chance).to(DTYPES[dtype]), torch.rand(SIZE, generator=chance).to(DTYPES[dtype])


def _loop(u: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    after = []
    for token in u:
        state = state * decay + token
        after.append(state)
    return torch.stack(after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[1], [17], [1, 1, 1], [3, 1, 17, 2], [2, 17, 1, 3, 3]])
def test_every_row_is_what_a_loop_gives_to_the_bit(dtype: str, counts: list[int]) -> None:
    states, (u, decay) = _states(dtype), _inputs(sum(counts), dtype)
    rows, at = [], 0
    for number, count in enumerate(counts):
        rows.append(RecurrenceRow(at, count, None if number % 2 else number))
        at += count
    before = states.clone()
    after, new = OPS.recur(u, decay, states, OPS.plan_recurrence(rows))
    assert torch.equal(states, before), "a state was written"
    for number, row in enumerate(rows):
        start = torch.zeros(SIZE, dtype=states.dtype) if row.page is None else before[row.page, 0]
        expected = _loop(u[row.start : row.start + row.count], decay, start)
        assert torch.equal(after[row.start : row.start + row.count], expected)
        assert torch.equal(new[number], expected[-1])


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_sequence_may_be_cut_anywhere(cut: int) -> None:
    states, (u, decay) = _states("float32"), _inputs(12, "float32")
    whole, end = OPS.recur(u, decay, states, OPS.plan_recurrence([RecurrenceRow(0, 12, None)]))
    first, middle = OPS.recur(u[:cut], decay, states, OPS.plan_recurrence([RecurrenceRow(0, cut, None)]))
    OPS.write_states(middle, states, torch.tensor([4]))
    second, last = OPS.recur(u[cut:], decay, states, OPS.plan_recurrence([RecurrenceRow(0, 12 - cut, 4)]))
    assert torch.equal(torch.cat([first, second]), whole) and torch.equal(last, end)


def test_nan_stays_in_its_row() -> None:
    states, (u, decay) = _states("float32"), _inputs(6, "float32")
    states[3] = torch.nan
    u[0] = torch.nan
    rows = [RecurrenceRow(0, 2, 0), RecurrenceRow(2, 3, None), RecurrenceRow(5, 1, 3)]
    after, new = OPS.recur(u, decay, states, OPS.plan_recurrence(rows))
    assert after[:2].isnan().all() and after[5].isnan().all()
    assert torch.equal(after[2:5], _loop(u[2:5], decay, torch.zeros(SIZE))) and new[1].isfinite().all()


def test_states_are_written_to_their_pages_and_no_others() -> None:
    states = _states("float64")
    before, new = states.clone(), torch.ones(2, SIZE, dtype=torch.float64)
    OPS.write_states(new, states, torch.tensor([5, 2]))
    assert torch.equal(states[[5, 2], 0], new)
    assert torch.equal(states[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
