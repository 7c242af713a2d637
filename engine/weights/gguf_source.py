"""A GGUF file as a checkpoint: Hugging Face names, shapes and row order, block types turned into numbers on the way.

Owned here: the WeightSource over GgufFile. Not here: the format, the name tables and the block layouts, each in its own module.
Invariant: what `load` gives is what the same model's safetensors hold, up to the file's own rounding. torch is imported by `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.weights.gguf import GgufFile
from engine.weights.gguf_arch import translate
from engine.weights.gguf_info import gguf_info
from engine.weights.source import TensorInfo

if TYPE_CHECKING:
    import torch


class GgufSource:
    """WeightSource over one GGUF file. Raises CorruptFile or UnsupportedModel on opening, nothing later."""

    def __init__(self, path: str | Path) -> None:
        self._file = GgufFile(path)
        try:
            translation = translate(self._file)
            self._stored = translation.tensors
            self.tensors: Mapping[str, TensorInfo] = {name: self._tensor_info(at.name) for name, at in self._stored.items()}
            self.info = gguf_info(self._file, translation.config, self.tensors)
        except BaseException:
            self._file.close()
            raise

    def load(self, name: str) -> torch.Tensor:
        import torch

        from engine.quant.gguf_dequantize import dequantize

        stored, shape = self._stored[name], self.tensors[name].shape
        kind = self._file.tensors[stored.name].type
        rows = torch.frombuffer(self._file.raw(stored.name), dtype=torch.uint8).view(shape[0], -1)
        if stored.interleaved_heads:
            pairs = rows.view(stored.interleaved_heads, -1, 2, rows.shape[1])
            rows = pairs.transpose(1, 2).reshape(rows.shape)
        return dequantize(rows, kind).view(shape)

    def raw(self, name: str) -> tuple[memoryview, str]:
        return self._file.raw(self._stored[name].name), self.tensors[name].dtype

    def interleaved_heads(self, name: str) -> int:
        return self._stored[name].interleaved_heads

    def close(self) -> None:
        self._file.close()

    def _tensor_info(self, stored: str) -> TensorInfo:
        tensor = self._file.tensors[stored]
        return TensorInfo(tensor.dims[::-1], tensor.type.name, tensor.bytes)
