"""Reads the header of one safetensors file.

Owned here: the format of the header and what must hold between it and the file (S08). Not here: folders and shards
(safetensors.py). Invariant: the tensors of a file that passes tile its data exactly: each lies wholly inside, none overlap.
No torch. Source: the format section of the safetensors documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CorruptFile, UnsupportedModel
from engine.weights.files import ModelFile
from engine.weights.json_file import parse_json_object

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 48
ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_FIELDS = {"dtype", "shape", "data_offsets"}
_VALUES_PER_TENSOR = MAX_DIMENSIONS + 8


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in its file. `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_header(file: ModelFile) -> dict[str, Placed]:
    """Raises CorruptFile, or UnsupportedModel for a dtype we do not know."""
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file.size - 8):
        raise file.corrupt(f"claims a header of {length} bytes")
    header = parse_json_object(file.read(8, length), file.corrupt, MAX_TENSORS * _VALUES_PER_TENSOR)
    _check_metadata(header.pop("__metadata__", {}), file.corrupt)
    if len(header) > MAX_TENSORS:
        raise file.corrupt(f"claims {len(header)} tensors")
    tensors = {name: _placed(name, entry, 8 + length, file) for name, entry in header.items()}
    _check_tiling(tensors, 8 + length, file)
    return tensors


def _check_metadata(metadata: object, corrupt: Callable[[str], CorruptFile]) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt("has a __metadata__ that is not a table of strings")


def _placed(name: str, entry: Any, data_start: int, file: ModelFile) -> Placed:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise file.corrupt(f"describes the tensor {name[:80]!r} wrongly")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UnsupportedModel(f"{file.name}: the tensor {name[:80]!r} has the unknown type {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or max(shape, default=0) > MAX_ELEMENTS:
        raise file.corrupt(f"the tensor {name[:80]!r} has an impossible shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise file.corrupt(f"the tensor {name[:80]!r} has impossible offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise file.corrupt(f"the tensor {name[:80]!r} has {end - begin} bytes for the shape {shape} of {dtype}")
    return Placed(dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(values: object) -> bool:
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110 (a generator takes twice as long, and a hostile header has 200,000 of these)
        if type(value) is not int or value < 0:
            return False
    return True


def _check_tiling(tensors: Mapping[str, Placed], data_start: int, file: ModelFile) -> None:
    end = data_start
    for placed in sorted(tensors.values(), key=lambda placed: (placed.offset, placed.bytes)):
        if placed.offset != end:
            raise file.corrupt("has tensors that overlap or leave gaps")
        end += placed.bytes
    if end != file.size:
        raise file.corrupt(f"has {file.size} bytes where its header needs {end}")
