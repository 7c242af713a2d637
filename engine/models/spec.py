"""A model as data: what the one decoder builds and what every executor interprets.

A family (engine/models/families) translates a checkpoint's config into a ModelSpec; nothing below reads config keys again.
Per-layer differences are fields with values, never booleans keyed on a model's name.
Shapes: H hidden size, Hq / Hk query / key-value heads, D head size, S state size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding with its frequencies resolved for the configured context: every backend multiplies by the same numbers.

    inverse_frequencies: float64 values, `dim / 2` of them, radians per position. Halves are rotated (x[i], x[i + dim/2]).
    """

    kind: RopeKind
    dim: int  # rotated dimensions of a head, <= D (partial rotary)
    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)


@dataclass(frozen=True, slots=True)
class NormSpec:
    epsilon: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    rope: RopeSpec | None
    window: int | None = None  # a query sees itself and the window - 1 tokens before it
    qk_norm: NormSpec | None = None  # over D, per head, before RoPE
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """A plain linear recurrence with a diagonal state: s[t] = decay * s[t-1] + B x[t], y[t] = C s[t], from s[-1] = 0.

    `decay` is a parameter of S numbers, used as it is stored; B is [S, H] and C is [H, S].
    """

    size: int  # S: all that is kept of a sequence, however long it is
    in_bias: bool = False  # added to B x
    out_bias: bool = False  # added to C s


@dataclass(frozen=True, slots=True)
class MlpSpec:
    hidden: int  # F
    activation: Activation
    gated: bool = True  # down(act(gate x) * up x), else down(act(up x))
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: AttentionSpec | RecurrenceSpec
    ffn: MlpSpec
    mixer_norm: NormSpec
    ffn_norm: NormSpec
    mixer_post_norm: NormSpec | None = None
    ffn_post_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied_embeddings: bool
    context_tokens: int  # trained (or extended by its own RoPE scaling)
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    notes: tuple[str, ...] = ()  # said in `show`: e.g. a dynamic RoPE fixed for this context


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """Where one parameter of ours comes from. Several checkpoint names are stacked on rows (dimension 0), in this order.

    `shape` is of the whole parameter. An optional parameter may be absent from the checkpoint (a tied head).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
