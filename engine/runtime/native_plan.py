"""From a ModelSpec to the plan that native code interprets, and what the native backend cannot run.

Owned here: the records of engine/kernels/cpu/plan.h, written with struct, and the list of what falls to the reference backend.
Invariant: `plan_bytes` is only for a spec that `unsupported` has nothing to say about. No torch, no numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

from engine.cache.layout import CacheLayout
from engine.models.spec import Activation, AttentionSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec

PLAN_VERSION = 1
ABSENT = -1
MOST_HEAD_DIM = 512
KV_TYPES: Mapping[str, int] = {"float32": 0, "float16": 1, "int8": 2}
_ACTIVATIONS: Mapping[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_HEADER, _GROUP, _ROPE, _LAYER = "<8s10I3i3f", "<2I", "<d2I", "<16i4IiI3fI"
_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


class Numbered(Protocol):
    @property
    def index(self) -> int: ...


def unsupported(spec: ModelSpec, kv_dtype: str) -> list[str]:
    """Why the native backend cannot run this model, a phrase each; [] when it can."""
    found = {reason: None for layer in spec.layers for reason in _layer_reasons(layer)}
    if spec.final_norm.kind != "rms":
        found["layer norms"] = None
    if spec.logit_softcap is not None:
        found["capped logits"] = None
    if kv_dtype not in KV_TYPES:
        found[f"a cache of {kv_dtype}"] = None
    return list(found)


def _layer_reasons(layer: LayerSpec) -> list[str]:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec):
        return ["recurrent layers"]
    norms = (layer.mixer_norm, layer.ffn_norm)
    checks = {
        "layer norms": any(norm.kind != "rms" or norm.bias for norm in norms),
        "norms behind a layer": layer.mixer_post_norm is not None or layer.ffn_post_norm is not None,
        "norms of queries and keys": mixer.qk_norm is not None,
        "capped attention scores": mixer.softcap is not None,
        f"heads wider than {MOST_HEAD_DIM}": mixer.head_dim > MOST_HEAD_DIM,
        "more than 64 query heads for a key-value head": mixer.heads // mixer.kv_heads > 64,
    }
    return [reason for reason, holds in checks.items() if holds]


def plan_bytes(spec: ModelSpec, layout: CacheLayout, tensors: Mapping[str, Numbered], kv_dtype: str, max_slots: int) -> bytes:
    """The plan of `spec` for the packed tensors, by our parameter names. A tied head is the embedding."""
    ropes: dict[RopeSpec, int] = {}
    group_of = {layer: number for number, group in enumerate(layout.groups) for layer in group.layers}
    layers = [_layer(spec.layers[i], i, group_of[i], tensors, ropes) for i in range(len(spec.layers))]
    groups = [struct.pack(_GROUP, group.window_tokens or 0, 0) for group in layout.groups]
    frequencies: list[float] = []
    rope_records = []
    for rope in ropes:
        rope_records.append(struct.pack(_ROPE, rope.attention_factor, rope.dim, len(frequencies)))
        frequencies += rope.inverse_frequencies
    body = b"".join([*groups, *rope_records, *layers, struct.pack(f"<{len(frequencies)}d", *frequencies)])
    counts = (spec.vocab_size, spec.hidden, len(layers), len(groups), len(ropes), len(frequencies))
    weights = (tensors["embed"].index, tensors.get("head", tensors["embed"]).index, tensors["final_norm"].index)
    scales = (spec.embedding_scale, spec.logit_scale, spec.final_norm.epsilon)
    size = struct.calcsize(_HEADER) + len(body)
    header = struct.pack(_HEADER, b"CAVEPLAN", PLAN_VERSION, size, *counts, KV_TYPES[kv_dtype], max_slots, *weights, *scales)
    return header + body


def _layer(layer: LayerSpec, index: int, group: int, tensors: Mapping[str, Numbered], ropes: dict[RopeSpec, int]) -> bytes:
    mixer, ffn = layer.mixer, layer.ffn
    assert isinstance(mixer, AttentionSpec), "refused before"
    at = f"layers.{index}"
    linears = [_number(tensors, f"{at}.{name}", wanted=name != "gate" or ffn.gated) for name in _LINEARS]
    biased = {"q": mixer.qkv_bias, "k": mixer.qkv_bias, "v": mixer.qkv_bias, "o": mixer.out_bias}
    biases = [_number(tensors, f"{at}.{n}.bias", wanted=biased.get(n, ffn.bias) and (n != "gate" or ffn.gated)) for n in _LINEARS]
    norms = [tensors[f"{at}.mixer_norm"].index, tensors[f"{at}.ffn_norm"].index]
    rope = ABSENT if mixer.rope is None else ropes.setdefault(mixer.rope, len(ropes))
    heads = (mixer.heads, mixer.kv_heads, mixer.head_dim, group)
    epsilons = (_epsilon(layer.mixer_norm), _epsilon(layer.ffn_norm))
    return struct.pack(_LAYER, *linears, *biases, *norms, *heads, rope, _ACTIVATIONS[ffn.activation], mixer.scale, *epsilons, 0)


def _number(tensors: Mapping[str, Numbered], name: str, *, wanted: bool) -> int:
    return tensors[name].index if wanted else ABSENT


def _epsilon(norm: NormSpec) -> float:
    return norm.epsilon
