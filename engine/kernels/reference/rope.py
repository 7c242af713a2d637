"""Rotary embedding with given frequencies; which ones a model needs is resolved in engine/models/rope.py."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.spec import RopeSpec


def rope_tables(positions: Tensor, rope: RopeSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[:, None] * frequencies
    return (angles.cos() * rope.attention_factor).to(dtype), (angles.sin() * rope.attention_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    a, b, kept = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, kept], dim=-1).to(x.dtype)
