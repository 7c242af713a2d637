"""The one decoder: a ModelSpec and named weights, run over any backend's Ops.

Owned here: the order of operations in a layer and what our parameter names mean. Not here: arithmetic (kernels), batching and
pages (runtime). There is no prefill or decode: a batch is T new tokens of some sequences. Invariant: a layer difference is a
value in the spec, never a branch on a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.ops import AttentionPlan, LayerCache, Linear, Ops
from engine.models.spec import LayerSpec, ModelSpec, NormSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What a step means for one cache group."""

    slots: Tensor  # int64 [T]: flat cache slot of each token
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One step on the device: T tokens, of which N are followed by a sample."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], logical: what RoPE turns by
    sampled: Tensor  # int64 [N], indices into T
    groups: tuple[GroupBatch, ...]
    adapters: Tensor | None = None  # int64 [T]


@dataclass(frozen=True, slots=True)
class KvCache:
    """Per layer of the model: its planes, and which cache group they belong to."""

    layers: tuple[LayerCache, ...]
    group_of_layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Norm:
    spec: NormSpec
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear | None
    up: Linear
    down: Linear
    mixer_norm: _Norm
    ffn_norm: _Norm
    q_norm: _Norm | None
    k_norm: _Norm | None
    mixer_post_norm: _Norm | None
    ffn_post_norm: _Norm | None


class Decoder:
    """`weights` has our parameter names. Missing ones are a KeyError here: the loader has checked the set before."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self.spec, self._ops = spec, ops
        self._embed = weights["embed"]
        # A checkpoint that is tied and yet brings a head of its own has that head.
        self._head = Linear(weights.get("head", self._embed))
        self._final_norm = _norm(weights, "final_norm", spec.final_norm)
        self._layers = tuple(_layer(weights, f"layers.{i}", layer) for i, layer in enumerate(spec.layers))
        self._compute = torch.float64 if self._embed.dtype == torch.float64 else torch.float32

    def forward(self, batch: DeviceBatch, cache: KvCache) -> Tensor:
        """Runs the step's tokens, writing their keys and values into `cache`. Returns the sampled tokens' logits [N, V]."""
        ops = self._ops
        x = ops.embed(batch.tokens, self._embed, self.spec.embedding_scale)
        tables = self._rope_tables(batch.positions)
        for i, layer in enumerate(self._layers):
            x = self._mix(x, i, batch, cache, tables)
            x = self._feed_forward(x, layer, batch.adapters)
        x = self._normalise(ops.take_rows(x, batch.sampled), self._final_norm)
        slots = None if batch.adapters is None else batch.adapters[batch.sampled]
        return ops.logits(x, self._head, self.spec.logit_scale, self.spec.logit_softcap, slots)

    def _mix(
        self,
        x: Tensor,
        index: int,
        batch: DeviceBatch,
        cache: KvCache,
        tables: Mapping[RopeSpec, tuple[Tensor, Tensor]],
    ) -> Tensor:
        ops, layer, planes = self._ops, self._layers[index], cache.layers[index]
        spec, group = layer.spec.mixer, batch.groups[cache.group_of_layer[index]]
        h = self._normalise(x, layer.mixer_norm)
        q, k, v = ops.project_qkv(h, layer.q, layer.k, layer.v, batch.adapters)
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = k.view(-1, spec.kv_heads, spec.head_dim), v.view(-1, spec.kv_heads, spec.head_dim)
        if layer.q_norm and layer.k_norm:
            q, k = self._normalise(q, layer.q_norm), self._normalise(k, layer.k_norm)
        if spec.rope:
            q, k = ops.rotate(q, *tables[spec.rope]), ops.rotate(k, *tables[spec.rope])
        ops.write_kv(k, v, planes, group.slots)
        mixed = ops.attend(q, planes, group.plan, spec)
        return self._add(x, mixed, layer.o, layer.mixer_post_norm, batch.adapters)

    def _feed_forward(self, x: Tensor, layer: _Layer, adapters: Tensor | None) -> Tensor:
        activation = layer.spec.ffn.activation
        h = self._normalise(x, layer.ffn_norm)
        if layer.gate:
            h = self._ops.gated(h, layer.gate, layer.up, activation, adapters)
        else:
            h = self._ops.activated(h, layer.up, activation, adapters)
        return self._add(x, h, layer.down, layer.ffn_post_norm, adapters)

    def _add(self, x: Tensor, h: Tensor, linear: Linear, post_norm: _Norm | None, adapters: Tensor | None) -> Tensor:
        if post_norm is None:
            return self._ops.linear_add(h, linear, x, adapters)
        return x + self._normalise(self._ops.linear(h, linear, adapters), post_norm)

    def _normalise(self, x: Tensor, norm: _Norm) -> Tensor:
        if norm.spec.kind == "rms":
            return self._ops.rms_norm(x, norm.weight, norm.spec.epsilon)
        return self._ops.layer_norm(x, norm.weight, norm.bias, norm.spec.epsilon)

    def _rope_tables(self, positions: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        ropes = {layer.spec.mixer.rope for layer in self._layers} - {None}
        return {rope: self._ops.rope_tables(positions, rope, self._compute) for rope in ropes if rope}


def _norm(weights: Mapping[str, Tensor], name: str, spec: NormSpec) -> _Norm:
    return _Norm(spec, weights[name], weights[f"{name}.bias"] if spec.bias else None)


def _linear(weights: Mapping[str, Tensor], name: str, bias: bool) -> Linear:
    return Linear(weights[name], weights[f"{name}.bias"] if bias else None)


def _layer(weights: Mapping[str, Tensor], at: str, spec: LayerSpec) -> _Layer:
    mixer, ffn = spec.mixer, spec.ffn

    def optional(name: str, norm: NormSpec | None) -> _Norm | None:
        return None if norm is None else _norm(weights, f"{at}.{name}", norm)

    return _Layer(
        spec=spec,
        q=_linear(weights, f"{at}.q", mixer.qkv_bias),
        k=_linear(weights, f"{at}.k", mixer.qkv_bias),
        v=_linear(weights, f"{at}.v", mixer.qkv_bias),
        o=_linear(weights, f"{at}.o", mixer.out_bias),
        gate=_linear(weights, f"{at}.gate", ffn.bias) if ffn.gated else None,
        up=_linear(weights, f"{at}.up", ffn.bias),
        down=_linear(weights, f"{at}.down", ffn.bias),
        mixer_norm=_norm(weights, f"{at}.mixer_norm", spec.mixer_norm),
        ffn_norm=_norm(weights, f"{at}.ffn_norm", spec.ffn_norm),
        q_norm=optional("q_norm", mixer.qk_norm),
        k_norm=optional("k_norm", mixer.qk_norm),
        mixer_post_norm=optional("mixer_post_norm", spec.mixer_post_norm),
        ffn_post_norm=optional("ffn_post_norm", spec.ffn_post_norm),
    )
