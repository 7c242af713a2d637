"""Rows of a table: token embeddings, and the hidden states that are to be sampled."""

from __future__ import annotations

from torch import Tensor


def embed(tokens: Tensor, table: Tensor, scale: float) -> Tensor:
    rows = table.index_select(0, tokens)
    return rows if scale == 1.0 else rows * scale


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)
