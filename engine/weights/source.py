"""What a checkpoint looks like to the loader, whatever file format holds it.

Owned here: the WeightSource seam and the choice of reader. Not here: the formats themselves (gguf.py, safetensors.py) and
which parameters a model needs (engine/models/families). Names, shapes and layouts are those of a Hugging Face checkpoint in
both formats, so that one family serves both. Importing this module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.types import ModelInfo, WeightFormat


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as stored. `shape` is in checkpoint order: (out, in) for a linear layer."""

    shape: tuple[int, ...]
    dtype: str  # "F32", "BF16", "Q4_1", ...
    bytes: int


def main_type(tensors: Iterable[TensorInfo]) -> str:
    """The type that holds most bytes."""
    held: Counter[str] = Counter()
    for tensor in tensors:
        held[tensor.dtype] += tensor.bytes
    return held.most_common(1)[0][0]


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Names for a message: the first ones, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name[:80] for name in names[:limit]) + more


class Progress(Protocol):
    def __call__(self, stage: str, fraction: float, /) -> None: ...


class WeightSource(Protocol):
    """An open checkpoint: every tensor is known to lie wholly inside its file before the first is read."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def load(self, name: str) -> torch.Tensor:
        """The tensor in checkpoint layout: stored dtype, or float32 for block-quantised types. It may view the mapped file."""
        ...

    def raw(self, name: str) -> tuple[memoryview, str]:
        """The bytes as they lie in the file, and their type. Rows of interleaved heads are not put back in order."""
        ...

    def interleaved_heads(self, name: str) -> int:
        """In `raw` the rows of each of so many heads lie as x0 y0 x1 y1 ..., to be all x before all y; 0: they are in order."""
        ...

    def close(self) -> None: ...


def open_source(path: str, format: WeightFormat) -> WeightSource:  # noqa: A002 (the field's name everywhere)
    """Opens a .gguf file or a folder of safetensors. Raises CorruptFile, UnsupportedModel, ModelNotFound."""
    if format == "gguf":
        from engine.weights.gguf_source import GgufSource

        return GgufSource(path)
    from engine.weights.safetensors import SafetensorsSource

    return SafetensorsSource(path)
