"""Normalisation over the last dimension, computed in the compute type and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 stays float64; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon) * weight.to(wide.dtype)
    return (scaled if bias is None else scaled + bias.to(wide.dtype)).to(x.dtype)
