"""Checkpoints of the tests of packed files: opened, packed, and read back as the loader would have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.models.families import family_for
from engine.models.spec import ModelSpec, ParameterInfo
from engine.weights.loader import load_weights
from engine.weights.packed import PackedFile, open_or_pack, pack
from engine.weights.source import WeightSource, open_source
from tests.engine.kernels.cpu.packed_calls import unpack_tensor

DIGEST = "sha256:" + "ab" * 32


def quiet(stage: str, fraction: float) -> None:
    pass


@dataclass(frozen=True)
class Checkpoint:
    source: WeightSource
    spec: ModelSpec
    parameters: Mapping[str, ParameterInfo]

    def pack(self, target: Path, progress: Callable[[str, float], None] = quiet, **options: object) -> None:
        pack(self.source, self.spec, self.parameters, target, source_digest=DIGEST, progress=progress, **options)  # type: ignore[arg-type]

    def open_or_pack(self, path: Path | str = "", digest: str = DIGEST) -> PackedFile:
        return open_or_pack(self.source, self.spec, self.parameters, path=str(path), digest=digest, progress=quiet)

    def load(self) -> dict[str, torch.Tensor]:
        return load_weights(self.source, self.spec, self.parameters, "float32", "cpu", quiet, lambda _: None)


@contextmanager
def checkpoint(path: Path) -> Iterator[Checkpoint]:
    source = open_source(str(path), "safetensors" if path.is_dir() else "gguf")
    family = family_for(source.info.architecture)
    spec = family.spec(source.info.config, None)
    try:
        yield Checkpoint(source, spec, family.parameters(spec))
    finally:
        source.close()


def unpacked(packed: PackedFile, name: str) -> torch.Tensor:
    """[rows, columns] float32, vectors as one row."""
    tensor = packed.tensors[name]
    data = packed.data[tensor.offset : tensor.offset + tensor.bytes]
    return unpack_tensor(tensor.kind, data, tensor.exponent, tensor.rows, tensor.columns)
