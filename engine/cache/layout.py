"""How a model's cache is laid out: groups of layers that share one block table, and what a page of each holds in bytes.

Allocator, radix tree and scheduler know group numbers and bytes only; executors allocate each plane as [pages, page slots, ...].
A group that grows with its sequences has a slot for each of PAGE_TOKENS tokens in a page. A state group has one slot: a page is
all that its layers keep of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.spec import AttentionSpec, ModelSpec, RecurrenceSpec
from engine.runtime.batch import PAGE_TOKENS

GroupKind = Literal["full", "window", "latent", "state"]
KvDtype = Literal["float64", "float32", "bfloat16", "float16", "int8"]

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a page: shape per token, e.g. k of layer 3 is (Hk, D)."""

    name: str  # "k", "v", "k_scale", "v_scale"; in a state group "state"
    layer: int
    dtype: str
    shape: tuple[int, ...]  # per token; in a state group: of the whole state

    @property
    def bytes_per_token(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class CacheGroup:
    kind: GroupKind
    window_tokens: int | None  # window groups only
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]

    @property
    def page_slots(self) -> int:
        """Slots of a page: one for each token, or for the one state of a sequence, however long it is."""
        return 1 if self.kind == "state" else PAGE_TOKENS

    @property
    def bytes_per_page(self) -> int:
        return self.page_slots * sum(plane.bytes_per_token for plane in self.planes)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[CacheGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of the groups that grow with a sequence."""
        return sum(g.bytes_per_page for g in self.groups if g.kind != "state") // PAGE_TOKENS


def cache_layout(spec: ModelSpec, kv_dtype: KvDtype) -> CacheLayout:
    """Group the layers of `spec` by what they keep: all full-attention layers are one group, each window size another, and all
    recurrent layers together a state group. Groups stand in the order of their first layers.

    int8 planes come with a float16 scale per token and head. A state is float32, or float64 beside a float64 cache: it is read
    and written again with every token, so that the rounding of anything narrower would add up.
    """
    by_keeping: dict[tuple[GroupKind, int | None], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        by_keeping.setdefault(_kept(layer.mixer), []).append(index)
    groups = []
    for (kind, window), layers in by_keeping.items():
        planes = [plane for index in layers for plane in _planes(index, spec.layers[index].mixer, kv_dtype)]
        groups.append(CacheGroup(kind, window, tuple(layers), tuple(planes)))
    return CacheLayout(tuple(groups))


def _kept(mixer: AttentionSpec | RecurrenceSpec) -> tuple[GroupKind, int | None]:
    if isinstance(mixer, RecurrenceSpec):
        return "state", None
    return ("full" if mixer.window is None else "window"), mixer.window


def _planes(layer: int, mixer: AttentionSpec | RecurrenceSpec, kv_dtype: KvDtype) -> list[Plane]:
    if isinstance(mixer, RecurrenceSpec):
        return [Plane("state", layer, "float64" if kv_dtype == "float64" else "float32", (mixer.size,))]
    planes = []
    for name in ("k", "v"):
        planes.append(Plane(name, layer, kv_dtype, (mixer.kv_heads, mixer.head_dim)))
        if kv_dtype == "int8":
            planes.append(Plane(f"{name}_scale", layer, "float16", (mixer.kv_heads,)))
    return planes
