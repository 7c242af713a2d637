"""The operations a backend offers to the decoder and the executor. The docstrings are the contract.

Not here: any implementation. `reference/` is the plain torch one and the oracle of every other, under the same file stems.
Letters: T tokens of the step, R rows, N sampled rows, H hidden, Hq / Hk query and key-value heads, D head size, S state size, F
feed-forward size, V vocabulary, P pages, B = PAGE_TOKENS tokens a page. "Compute type": float64 for float64 activations, else
float32.
Tolerance, where none is given: the formula evaluated in the compute type, then rounded once to the type of the result.
Invariant: no result depends on other rows' values, NaN or infinity included, nor on what lies in a page beyond a row's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.cache.layout import Plane
from engine.models.spec import Activation, AttentionSpec, RopeSpec
from engine.runtime.batch import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class AdapterBank:
    """Low-rank updates of one linear, R their rank. Slot 0 is "none": its entries are never read."""

    a: Tensor  # [slots, R, in]
    b: Tensor  # [slots, out, R]
    scale: Tensor  # [slots]


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]
    adapters: AdapterBank | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The planes of one layer, [P, B, Hk, D]; scales [P, B, Hk] float16 when keys and values are int8, else None."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Tokens start .. start + count - 1 of the step: new tokens of one sequence, at cache positions from `position` on.

    `pages` maps cache position t to slot t % B of pages[t // B]; NO_PAGE where a window has passed. With a tree, the last len(tree)
    tokens are drafts: tree[i] is the parent of draft i among the drafts, -1 the last plain token (a row has at least one).
    """

    start: int
    count: int
    position: int
    pages: Sequence[int]
    tree: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class RecurrenceRow:
    """Tokens start .. start + count - 1 of the step: new tokens of one sequence. `page` has its state; None: it begins, from 0."""

    start: int
    count: int
    page: int | None


AttentionPlan = Any  # what a backend derives from the rows once per step and cache group
RecurrencePlan = Any


class Ops(Protocol):
    """Adapter slots, everywhere: int64 [T] on the device, 0 = none; None when the step has none."""

    # --- embedding and head

    def embed(self, tokens: Tensor, table: Tensor, scale: float) -> Tensor:
        """tokens int64 [T], table [V, H] -> table[tokens] * scale, [T, H] in the table's type."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows int64 [N] -> x[rows], [N, H]."""
        ...

    def logits(self, x: Tensor, head: Linear, scale: float, softcap: float | None, slots: Tensor | None) -> Tensor:
        """x [N, H] -> y = linear(x) * scale, then softcap * tanh(y / softcap) if given; [N, V] in the compute type."""
        ...

    # --- norms

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x [..., n], weight [n] -> x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in x's type."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        """x [..., n] -> (x - mean) / sqrt(variance + epsilon) * weight + bias; variance is the mean of squares (divided by n)."""
        ...

    # --- linear layers

    def linear(self, x: Tensor, layer: Linear, slots: Tensor | None) -> Tensor:
        """x [T, in] -> x W^T + bias + scale[s] (x A[s]^T) B[s]^T with s the token's slot, [T, out] in x's type.

        Tolerance: sums may be taken in any order in the compute type (float32 1e-5 relative to sum |x w|).
        """
        ...

    def linear_add(self, x: Tensor, layer: Linear, residual: Tensor, slots: Tensor | None) -> Tensor:
        """residual [T, out] + linear(x, layer, slots), in residual's type. May write into `residual`, which the caller gives up."""
        ...

    def project_qkv(self, x: Tensor, q: Linear, k: Linear, v: Linear, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Three linears of one x [T, H]: [T, Hq * D], [T, Hk * D], [T, Hk * D]. One method so that a backend may read x once."""
        ...

    # --- feed-forward

    def gated(self, x: Tensor, gate: Linear, up: Linear, activation: Activation, slots: Tensor | None) -> Tensor:
        """activation(linear(x, gate)) * linear(x, up), [T, F]."""
        ...

    def activated(self, x: Tensor, up: Linear, activation: Activation, slots: Tensor | None) -> Tensor:
        """activation(linear(x, up)), [T, F]. silu x sigmoid(x); gelu x Phi(x); gelu_tanh its tanh approximation; relu max(x, 0)."""
        ...

    # --- rotary embedding

    def rope_tables(self, positions: Tensor, rope: RopeSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> cos and sin of position * frequency, times the attention factor, each [T, dim / 2] in `dtype`.

        Angles and their cosines are taken in float64: at position 100,000 a float32 angle is off by 0.004.
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, D], tables [T, r]: pairs (x[i], x[i + r]), i < r, are rotated, dimensions from 2r on kept. In x's type."""
        ...

    # --- cache

    def allocate_plane(self, pages: int, plane: Plane, page_slots: int = PAGE_TOKENS) -> Tensor:
        """[pages, page_slots, *plane.shape] in plane.dtype, zeroed, on the backend's device. Raises MemoryError."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """k, v [T, Hk, D] into flat cache slots int64 [T] (page * B + offset, all different), converted to the plane's type.

        int8: scale = float16(max |x| / 127) per token and head, value = x / scale rounded half to even and clamped to
        -127..127 (0 where the scale is 0). A NaN makes the scale NaN, so that what reads it is NaN too.
        """
        ...

    def copy_pages(self, plane: Tensor, sources: Tensor, targets: Tensor) -> None:
        """plane[targets] = plane[sources]; int64 [n] each, no page in both."""
        ...

    def copy_slots(self, plane: Tensor, sources: Tensor, targets: Tensor) -> None:
        """plane[targets] = plane[sources] as it was, in flat slots (page * B + offset); int64 [n], targets all different."""
        ...

    # --- attention

    def plan_attention(self, rows: Sequence[AttentionRow], window: int | None) -> AttentionPlan:
        """What `attend` needs to know about the rows of a step, for one cache group. The rows cover tokens 0..T-1 in order."""
        ...

    def attend(self, q: Tensor, cache: LayerCache, plan: AttentionPlan, spec: AttentionSpec) -> Tensor:
        """q [T, Hq, D] over the cached keys, those just written included -> [T, Hq * D] in q's type.

        softmax over visible keys of spec.scale * q.k (softcap * tanh(s / softcap) if given), weighting the values; query head h
        reads key-value head h * Hk // Hq. A plain token sees the cache positions up to its own; a draft token those up to
        the last plain token, its ancestors and itself. With a window W, logical distance < W also holds (a draft's logical
        position is the last plain token's plus its depth). Tolerance: float32 1e-5 relative to max |v|.
        """
        ...

    # --- recurrence

    def plan_recurrence(self, rows: Sequence[RecurrenceRow]) -> RecurrencePlan:
        """What `recur` needs to know about the rows of a step, for one state group. The rows cover tokens 0..T-1 in order."""
        ...

    def recur(self, u: Tensor, decay: Tensor, states: Tensor, plan: RecurrencePlan) -> tuple[Tensor, Tensor]:
        """u [T, S], decay [S], states [P, 1, S] -> s after every token [T, S] in u's type, and after each row's last [R, S].

        s[t] = decay * s[t-1] + u[t], a row's first s[t-1] being its page of `states`, or zeros. One token after another, each
        product and each sum rounded to the type of `states`, which is also the type of the second result: so the same to the
        bit however a sequence is cut into rows, given equal u. Writes nothing.
        """
        ...

    def write_states(self, new: Tensor, states: Tensor, pages: Tensor) -> None:
        """states[pages, 0] = new; new [R, S] of the same type, pages int64 [R], all different. Takes no memory, so cannot fail."""
        ...

    # --- logits of sampled rows

    def finite(self, logits: Tensor) -> Tensor:
        """[N, V] -> bool [N]: no NaN and no infinity in the row."""
        ...


def layer_cache(planes: Mapping[str, Tensor]) -> LayerCache:
    """The planes of one layer by plane name (engine/cache/layout.py)."""
    return LayerCache(planes["k"], planes["v"], planes.get("k_scale"), planes.get("v_scale"))
