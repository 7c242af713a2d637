"""How a model's cache is laid out: groups of layers that share one block table, and what a page of each holds in bytes.

Allocator, radix tree and scheduler know group numbers and bytes only; executors allocate each plane as [pages, page tokens, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.spec import ModelSpec
from engine.runtime.batch import PAGE_TOKENS

GroupKind = Literal["full", "window", "latent", "state"]
KvDtype = Literal["float64", "float32", "bfloat16", "float16", "int8"]

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a page: shape per token, e.g. k of layer 3 is (Hk, D)."""

    name: str  # "k", "v", "k_scale", "v_scale"
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
    def bytes_per_page(self) -> int:
        """Of PAGE_TOKENS tokens; in a state group: of one sequence's state, however long it is."""
        return (1 if self.kind == "state" else PAGE_TOKENS) * sum(plane.bytes_per_token for plane in self.planes)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[CacheGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of the groups that grow with a sequence."""
        return sum(g.bytes_per_page for g in self.groups if g.kind != "state") // PAGE_TOKENS


def cache_layout(spec: ModelSpec, kv_dtype: KvDtype) -> CacheLayout:
    """Group the layers of `spec` by what they keep: all full-attention layers are one group, each window size another.

    int8 planes come with a float16 scale per token and head.
    """
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        by_window.setdefault(layer.mixer.window, []).append(index)
    groups = []
    for window, layers in by_window.items():
        planes: list[Plane] = []
        for index in layers:
            mixer = spec.layers[index].mixer
            for name in ("k", "v"):
                planes.append(Plane(name, index, kv_dtype, (mixer.kv_heads, mixer.head_dim)))
                if kv_dtype == "int8":
                    planes.append(Plane(f"{name}_scale", index, "float16", (mixer.kv_heads,)))
        kind: GroupKind = "full" if window is None else "window"
        groups.append(CacheGroup(kind, window, tuple(layers), tuple(planes)))
    return CacheLayout(tuple(groups))
