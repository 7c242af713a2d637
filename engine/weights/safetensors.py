"""A folder of safetensors as a checkpoint: one file, or shards with an index.

Owned here: which files belong to the checkpoint and that all of them are whole. Not here: a file's header (safetensors_header.py)
and config.json (hf_config.py). Invariant: each tensor comes from the one file that the index names; files beside them are never
read. Weights in pickle formats (.bin, .pt) are refused: opening one runs what is inside. torch is imported by `load`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import CorruptFile, ModelNotFound, UnsupportedModel
from engine.weights.files import ModelFile
from engine.weights.hf_config import folder_info, read_config
from engine.weights.json_file import read_json_object
from engine.weights.names import case_duplicates, is_safe_name
from engine.weights.safetensors_header import ITEM_BYTES, Placed, read_header
from engine.weights.source import TensorInfo, listed

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 512
_PULL = "pull or copy the model again"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_TORCH_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class _Located:
    file: ModelFile
    placed: Placed


class SafetensorsSource:
    """WeightSource over a folder. Raises CorruptFile, UnsupportedModel or ModelNotFound on opening, nothing later."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        config = read_config(folder)
        with ExitStack() as opened:
            self._tensors, warnings = _locate(folder, opened)
            self.tensors: Mapping[str, TensorInfo] = {
                name: TensorInfo(at.placed.shape, at.placed.dtype, at.placed.bytes) for name, at in self._tensors.items()
            }
            self.info = folder_info(config, self.tensors, warnings)
            self._opened = opened.pop_all()

    def load(self, name: str) -> torch.Tensor:
        import torch

        at = self._tensors[name]
        dtype = getattr(torch, _TORCH_NAMES[at.placed.dtype])
        if at.placed.bytes == 0:
            return torch.empty(at.placed.shape, dtype=dtype)
        count = at.placed.bytes // ITEM_BYTES[at.placed.dtype]
        if at.placed.offset % ITEM_BYTES[at.placed.dtype]:  # legal in the format, not for a typed view
            return torch.frombuffer(bytearray(self.raw(name)[0]), dtype=dtype).view(at.placed.shape)
        return torch.frombuffer(at.file.data(), dtype=dtype, count=count, offset=at.placed.offset).view(at.placed.shape)

    def raw(self, name: str) -> tuple[memoryview, str]:
        at = self._tensors[name]
        return memoryview(at.file.data())[at.placed.offset : at.placed.offset + at.placed.bytes], at.placed.dtype

    def interleaved_heads(self, name: str) -> int:  # noqa: ARG002 (none are, whatever its name)
        return 0

    def close(self) -> None:
        self._opened.close()


def _locate(folder: Path, opened: ExitStack) -> tuple[dict[str, _Located], list[str]]:
    if os.path.exists(folder / SINGLE):
        file = _open(folder / SINGLE, opened)
        tensors = {name: _Located(file, placed) for name, placed in read_header(file).items()}
        warnings: list[str] = []
    elif os.path.exists(folder / INDEX):
        tensors, warnings = _locate_sharded(folder, opened)
    else:
        raise _no_weights(folder)
    if not tensors:
        raise CorruptFile("the checkpoint holds no tensors")
    return tensors, warnings


def _locate_sharded(folder: Path, opened: ExitStack) -> tuple[dict[str, _Located], list[str]]:
    index = _read_index(folder)
    shards = sorted(set(index.values()))
    absent = [name for name in shards if not os.path.exists(folder / name)]
    if absent:
        raise CorruptFile(f"{len(absent)} of {len(shards)} weight files are missing: {listed(absent)}", hint=_PULL)
    files = {name: _open(folder / name, opened) for name in shards}
    headers = {name: read_header(file) for name, file in files.items()}
    lost = [tensor for tensor, shard in index.items() if tensor not in headers[shard]]
    if lost:
        raise CorruptFile(f"{len(lost)} tensors are not in the file that {INDEX} names: {listed(lost)}", hint=_PULL)
    unlisted = sum(tensor not in index or index[tensor] != shard for shard, header in headers.items() for tensor in header)
    warnings = [f"{unlisted} tensors are in a weight file but not in {INDEX}: they are not used"] if unlisted else []
    return {tensor: _Located(files[shard], headers[shard][tensor]) for tensor, shard in index.items()}, warnings


def _read_index(folder: Path) -> dict[str, str]:
    index = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
        raise CorruptFile(f"{INDEX}: weight_map is not a table from tensor to file")
    shards = set(index.values())
    for shard in shards:
        if not is_safe_name(shard) or not shard.endswith(".safetensors"):
            raise CorruptFile(f"{INDEX} names a file that may not be opened: {shard[:80]!r}")
    if len(shards) > MAX_SHARDS or case_duplicates(shards):
        raise CorruptFile(f"{INDEX} names too many files, or two that differ in case only")
    return index


def _no_weights(folder: Path) -> ModelNotFound | UnsupportedModel:
    pickled = sorted(name for name in os.listdir(folder) if name.endswith(_PICKLE_SUFFIXES))
    if pickled:
        return UnsupportedModel(
            f"the weights are in a format that can run code when opened: {listed(pickled)}",
            hint="use a safetensors or GGUF version",
        )
    return ModelNotFound(f"the folder holds neither {SINGLE} nor {INDEX}")


def _open(path: Path, opened: ExitStack) -> ModelFile:
    file = ModelFile(path)
    opened.callback(file.close)
    return file
