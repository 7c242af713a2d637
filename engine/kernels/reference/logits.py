"""From hidden states to logits, and the one question every step asks of them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.ops import Linear
from engine.kernels.reference.linear import linear
from engine.kernels.reference.norm import compute_dtype


def logits(x: Tensor, head: Linear, scale: float, softcap: float | None, slots: Tensor | None) -> Tensor:
    y = linear(x, head, slots).to(compute_dtype(x))
    if scale != 1.0:
        y = y * scale
    return y if softcap is None else torch.tanh(y / softcap) * softcap


def finite(logits: Tensor) -> Tensor:
    return logits.isfinite().all(-1)
