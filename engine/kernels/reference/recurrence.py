"""The linear recurrence: each token's state from the one before it, in order, all rows of the step abreast.

The only loop over tokens in the reference: a closed form (powers of the decay, or a scan) would round differently in every cut of
a sequence into rows. Rows are sorted longest first, so that those still running are always the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.ops import RecurrenceRow


@dataclass(frozen=True, slots=True)
class Plan:
    """R rows, longest first."""

    order: Tensor  # int64 [R]: which row of the step each is
    starts: Tensor  # int64 [R], indices into the step's tokens
    pages: Tensor  # int64 [R]; 0 for a row that begins its sequence
    begins: Tensor  # bool [R, 1]
    running: tuple[int, ...]  # rows that have a token 0, a token 1, ...


def plan_recurrence(rows: Sequence[RecurrenceRow], device: torch.device) -> Plan:
    order = sorted(range(len(rows)), key=lambda i: -rows[i].count)
    ordered = [rows[i] for i in order]
    running = [len(rows)] * min((row.count for row in rows), default=0)
    for at in range(len(running), max((row.count for row in rows), default=0)):
        running.append(sum(row.count > at for row in ordered))
    return Plan(
        order=torch.tensor(order, dtype=torch.int64, device=device),
        starts=torch.tensor([row.start for row in ordered], dtype=torch.int64, device=device),
        pages=torch.tensor([row.page or 0 for row in ordered], dtype=torch.int64, device=device),
        begins=torch.tensor([row.page is None for row in ordered], device=device)[:, None],
        running=tuple(running),
    )


def recur(u: Tensor, decay: Tensor, states: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    state = states[:, 0].index_select(0, plan.pages).masked_fill_(plan.begins, 0)
    decay, inputs, after = decay.to(state.dtype), u.to(state.dtype), torch.empty_like(u)
    for at, rows in enumerate(plan.running):
        tokens = plan.starts[:rows] + at
        state[:rows] = state[:rows] * decay + inputs[tokens]
        after[tokens] = state[:rows].to(u.dtype)
    return after, torch.empty_like(state).index_copy_(0, plan.order, state)


def write_states(new: Tensor, states: Tensor, pages: Tensor) -> None:
    states[:, 0].index_copy_(0, pages, new)
