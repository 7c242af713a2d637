"""The first half of a feed-forward block; its second linear is `linear_add`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from engine.kernels.ops import Linear
from engine.kernels.reference.linear import linear
from engine.models.spec import Activation


def gated(x: Tensor, gate: Linear, up: Linear, activation: Activation, slots: Tensor | None) -> Tensor:
    return _activate(linear(x, gate, slots), activation).mul_(linear(x, up, slots))


def activated(x: Tensor, up: Linear, activation: Activation, slots: Tensor | None) -> Tensor:
    return _activate(linear(x, up, slots), activation)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
