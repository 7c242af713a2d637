"""The reference backend: every operation in plain torch, on any device. The truth in tests, and the fallback in use.

One file of pure functions per group of operations; `ReferenceOps` gathers them into the contract of engine/kernels/ops.py,
where each is specified. Clear before fast, yet no Python loop over tokens but in the recurrence, where each waits for the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache.layout import Plane
from engine.kernels.ops import AttentionRow, RecurrenceRow
from engine.kernels.reference import attention, cache, embedding, mlp, norm, recurrence, rope
from engine.kernels.reference import linear as linears
from engine.kernels.reference import logits as heads
from engine.runtime.batch import PAGE_TOKENS


class ReferenceOps:
    """Implements engine.kernels.ops.Ops on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    embed = staticmethod(embedding.embed)
    take_rows = staticmethod(embedding.take_rows)
    logits = staticmethod(heads.logits)
    rms_norm = staticmethod(norm.rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    linear = staticmethod(linears.linear)
    linear_add = staticmethod(linears.linear_add)
    project_qkv = staticmethod(linears.project_qkv)
    gated = staticmethod(mlp.gated)
    activated = staticmethod(mlp.activated)
    rope_tables = staticmethod(rope.rope_tables)
    rotate = staticmethod(rope.rotate)
    write_kv = staticmethod(cache.write_kv)
    copy_pages = staticmethod(cache.copy_pages)
    copy_slots = staticmethod(cache.copy_slots)
    attend = staticmethod(attention.attend)
    recur = staticmethod(recurrence.recur)
    write_states = staticmethod(recurrence.write_states)
    finite = staticmethod(heads.finite)

    def allocate_plane(self, pages: int, plane: Plane, page_slots: int = PAGE_TOKENS) -> Tensor:
        return cache.allocate_plane(pages, plane, page_slots, self.device)

    def plan_attention(self, rows: Sequence[AttentionRow], window: int | None) -> attention.Plan:
        return attention.plan_attention(rows, window, self.device)

    def plan_recurrence(self, rows: Sequence[RecurrenceRow]) -> recurrence.Plan:
        return recurrence.plan_recurrence(rows, self.device)
