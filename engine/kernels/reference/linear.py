"""Linear layers over all tokens of a step at once, each token with its adapter."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from engine.kernels.ops import AdapterBank, Linear


def linear(x: Tensor, layer: Linear, slots: Tensor | None) -> Tensor:
    y = functional.linear(x, layer.weight, layer.bias)
    if slots is None or layer.adapters is None:
        return y
    return _add_adapters(y, x, layer.adapters, slots)


def linear_add(x: Tensor, layer: Linear, residual: Tensor, slots: Tensor | None) -> Tensor:
    return residual.add_(linear(x, layer, slots))


def project_qkv(x: Tensor, q: Linear, k: Linear, v: Linear, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return linear(x, q, slots), linear(x, k, slots), linear(x, v, slots)


def _add_adapters(y: Tensor, x: Tensor, bank: AdapterBank, slots: Tensor) -> Tensor:
    for slot in slots.unique().tolist():
        if slot:
            of_slot = (slots == slot).nonzero().squeeze(-1)
            update = functional.linear(functional.linear(x[of_slot], bank.a[slot]), bank.b[slot]) * bank.scale[slot]
            y = y.index_add(0, of_slot, update.to(y.dtype))
    return y
