"""The one decoder: a ModelSpec and named weights, run over any backend's Ops.

Owned here: the order of operations in a layer and what our parameter names mean. Not here: arithmetic (kernels), batching and
pages (runtime). There is no prefill or decode: a batch is T new tokens of some sequences. Invariants: a layer difference is a
value in the spec, never a branch on a model's name; no recurrent state is written, for a step that fails later must not move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.ops import AttentionPlan, LayerCache, Linear, Ops, RecurrencePlan
from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, RecurrenceSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What a step means for one group of attention layers."""

    slots: Tensor  # int64 [T]: flat cache slot of each token
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class StateBatch:
    """What a step means for one group of recurrent layers."""

    pages: Tensor  # int64 [R]: where the rows' new states belong
    plan: RecurrencePlan


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One step on the device: T tokens, of which N are followed by a sample."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], logical: what RoPE turns by
    sampled: Tensor  # int64 [N], indices into T
    groups: tuple[AttentionBatch | StateBatch, ...]
    adapters: Tensor | None = None  # int64 [T]


@dataclass(frozen=True, slots=True)
class Cache:
    """Per layer of the model: its planes (a state's is [P, 1, S]), and which cache group they belong to."""

    layers: tuple[LayerCache | Tensor, ...]
    group_of_layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewState:
    """What a recurrent layer keeps of each row after the step [R, S], not yet written to pages of its plane."""

    values: Tensor
    plane: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class _Norm:
    spec: NormSpec
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Attention:
    spec: AttentionSpec
    q: Linear
    k: Linear
    v: Linear
    q_norm: _Norm | None
    k_norm: _Norm | None


@dataclass(frozen=True, slots=True)
class _Recurrence:
    into: Linear
    decay: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    mixer: _Attention | _Recurrence
    o: Linear
    gate: Linear | None
    up: Linear
    down: Linear
    mixer_norm: _Norm
    ffn_norm: _Norm
    mixer_post_norm: _Norm | None
    ffn_post_norm: _Norm | None


_Tables = Mapping[RopeSpec, tuple[Tensor, Tensor]]


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

    def forward(self, batch: DeviceBatch, cache: Cache) -> tuple[Tensor, list[NewState]]:
        """Runs the step's tokens, writing their keys and values into `cache`. Returns the sampled tokens' logits [N, V], and the
        new states of recurrent layers, to be written once nothing of the step can fail any more."""
        ops = self._ops
        states: list[NewState] = []
        x = ops.embed(batch.tokens, self._embed, self.spec.embedding_scale)
        tables = self._rope_tables(batch.positions)
        for i, layer in enumerate(self._layers):
            h = self._normalise(x, layer.mixer_norm)
            h = self._mix(h, i, batch, cache, tables, states)
            x = self._add(x, h, layer.o, layer.mixer_post_norm, batch.adapters)
            x = self._feed_forward(x, layer, batch.adapters)
        x = self._normalise(ops.take_rows(x, batch.sampled), self._final_norm)
        slots = None if batch.adapters is None else batch.adapters[batch.sampled]
        return ops.logits(x, self._head, self.spec.logit_scale, self.spec.logit_softcap, slots), states

    def _mix(self, h: Tensor, index: int, batch: DeviceBatch, cache: Cache, tables: _Tables, states: list[NewState]) -> Tensor:
        mixer, planes, group = self._layers[index].mixer, cache.layers[index], batch.groups[cache.group_of_layer[index]]
        if isinstance(mixer, _Attention):
            assert isinstance(planes, LayerCache) and isinstance(group, AttentionBatch)
            return self._attend(h, mixer, planes, group, batch.adapters, tables)
        assert isinstance(planes, Tensor) and isinstance(group, StateBatch)
        u = self._ops.linear(h, mixer.into, batch.adapters)
        after, new = self._ops.recur(u, mixer.decay, planes, group.plan)
        states.append(NewState(new, planes, group.pages))
        return after

    def _attend(
        self, h: Tensor, mixer: _Attention, planes: LayerCache, group: AttentionBatch, adapters: Tensor | None, tables: _Tables
    ) -> Tensor:
        ops, spec = self._ops, mixer.spec
        q, k, v = ops.project_qkv(h, mixer.q, mixer.k, mixer.v, adapters)
        q = q.view(-1, spec.heads, spec.head_dim)
        k, v = k.view(-1, spec.kv_heads, spec.head_dim), v.view(-1, spec.kv_heads, spec.head_dim)
        if mixer.q_norm and mixer.k_norm:
            q, k = self._normalise(q, mixer.q_norm), self._normalise(k, mixer.k_norm)
        if spec.rope:
            q, k = ops.rotate(q, *tables[spec.rope]), ops.rotate(k, *tables[spec.rope])
        ops.write_kv(k, v, planes, group.slots)
        return ops.attend(q, planes, group.plan, spec)

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

    def _rope_tables(self, positions: Tensor) -> _Tables:
        ropes = {layer.mixer.spec.rope for layer in self._layers if isinstance(layer.mixer, _Attention)} - {None}
        return {rope: self._ops.rope_tables(positions, rope, self._compute) for rope in ropes if rope}


def _norm(weights: Mapping[str, Tensor], name: str, spec: NormSpec) -> _Norm:
    return _Norm(spec, weights[name], weights[f"{name}.bias"] if spec.bias else None)


def _linear(weights: Mapping[str, Tensor], name: str, bias: bool) -> Linear:
    return Linear(weights[name], weights[f"{name}.bias"] if bias else None)


def _optional_norm(weights: Mapping[str, Tensor], name: str, spec: NormSpec | None) -> _Norm | None:
    return None if spec is None else _norm(weights, name, spec)


def _mixer(weights: Mapping[str, Tensor], at: str, spec: AttentionSpec | RecurrenceSpec) -> _Attention | _Recurrence:
    if isinstance(spec, RecurrenceSpec):
        return _Recurrence(_linear(weights, f"{at}.in", spec.in_bias), weights[f"{at}.decay"])
    return _Attention(
        spec=spec,
        q=_linear(weights, f"{at}.q", spec.qkv_bias),
        k=_linear(weights, f"{at}.k", spec.qkv_bias),
        v=_linear(weights, f"{at}.v", spec.qkv_bias),
        q_norm=_optional_norm(weights, f"{at}.q_norm", spec.qk_norm),
        k_norm=_optional_norm(weights, f"{at}.k_norm", spec.qk_norm),
    )


def _layer(weights: Mapping[str, Tensor], at: str, spec: LayerSpec) -> _Layer:
    ffn = spec.ffn
    return _Layer(
        spec=spec,
        mixer=_mixer(weights, at, spec.mixer),
        o=_linear(weights, f"{at}.o", spec.mixer.out_bias),
        gate=_linear(weights, f"{at}.gate", ffn.bias) if ffn.gated else None,
        up=_linear(weights, f"{at}.up", ffn.bias),
        down=_linear(weights, f"{at}.down", ffn.bias),
        mixer_norm=_norm(weights, f"{at}.mixer_norm", spec.mixer_norm),
        ffn_norm=_norm(weights, f"{at}.ffn_norm", spec.ffn_norm),
        mixer_post_norm=_optional_norm(weights, f"{at}.mixer_post_norm", spec.mixer_post_norm),
        ffn_post_norm=_optional_norm(weights, f"{at}.ffn_post_norm", spec.ffn_post_norm),
    )
