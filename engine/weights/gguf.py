"""Reads the structure of a GGUF file: metadata, tensor table, where each tensor's bytes lie.

Owned here: the layout of a file (versions 2 and 3, little-endian) and what must hold between its parts. Not here: what an
architecture's keys mean (gguf_arch.py), vocabularies (gguf_vocabulary.py), turning blocks into numbers (engine/quant).
Invariant: a file that opens has all its tensors, disjoint and inside the file, and opening it cost no more than its header is
long, whatever it claims. No torch, no numpy. Source: the GGUF format document of ggml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, overload

from engine.errors import CorruptFile, UnsupportedModel
from engine.quant.gguf_types import TYPE_BY_ID, GgufType
from engine.weights.files import ModelFile
from engine.weights.gguf_cursor import GgufArray, HeaderCursor, ItemType, Scalar

MAX_HEADER_BYTES = 64 << 20  # the largest known, a vocabulary of 262k, takes about 16 MB
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

ScalarT = TypeVar("ScalarT", str, int, float, bool)

_MAGIC = b"GGUF"
_FIXED_BYTES = 24  # magic, version, two counts
_SMALLEST_PAIR_BYTES = 8 + 1 + 4 + 1  # length and one byte of key, type, one byte of value
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length and one byte of name, dimensions, one of them, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`dims` as stored, the fastest first: a linear layer has (in, out). `offset` counts from the start of the data section."""

    name: str
    dims: tuple[int, ...]
    type: GgufType
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) // self.type.block_elements * self.type.block_bytes


class GgufFile:
    """An open, checked GGUF file. Raises CorruptFile when it breaks the format, UnsupportedModel for what we do not read."""

    version: int
    alignment: int
    metadata: dict[str, Scalar | GgufArray]
    tensors: dict[str, GgufTensor]
    data_start: int

    def __init__(self, path: str | Path) -> None:
        self._file = ModelFile(path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    @property
    def name(self) -> str:
        return self._file.name

    def corrupt(self, what: str) -> CorruptFile:
        return self._file.corrupt(what)

    def unsupported(self, what: str, hint: str = "") -> UnsupportedModel:
        return UnsupportedModel(f"{self.name}: {what}", hint=hint)

    @overload
    def array(self, key: str, item: Literal["string"]) -> list[str] | None: ...
    @overload
    def array(self, key: str, item: Literal["f32"]) -> list[float] | None: ...
    @overload
    def array(self, key: str, item: Literal["i32", "u32"]) -> list[int] | None: ...
    def array(self, key: str, item: ItemType) -> list[str] | list[float] | list[int] | None:
        """The array under `key`, decoded; None when absent. Anything but an array of `item` is CorruptFile."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if not isinstance(found, GgufArray) or found.item != item:
            raise self.corrupt(f"{key} is not an array of {item}")
        return HeaderCursor(self._header, found.offset, self.corrupt).items(found, key)

    def scalar(self, key: str, kind: type[ScalarT]) -> ScalarT | None:
        """The value under `key`, None when absent; a value of any other type is CorruptFile."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
            raise self.corrupt(f"{key} is not of type {kind.__name__}")
        return found

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor, mapped."""
        tensor = self.tensors[name]
        start = self.data_start + tensor.offset
        return memoryview(self._file.data())[start : start + tensor.bytes]

    def read(self, name: str) -> bytes:
        """The bytes of a small tensor, without mapping the data section."""
        tensor = self.tensors[name]
        return self._file.read(self.data_start + tensor.offset, tensor.bytes)

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        if self._file.size < _FIXED_BYTES:
            raise self.corrupt("too short for a GGUF file")
        self._header = self._file.head(min(self._file.size, MAX_HEADER_BYTES))
        cursor = HeaderCursor(self._header, 0, self.corrupt)
        self._read_version(cursor)
        tensor_count, key_count = cursor.integer("i64"), cursor.integer("i64")
        cursor.check_count(key_count, MAX_KEYS, _SMALLEST_PAIR_BYTES, "keys")
        cursor.check_count(tensor_count, MAX_TENSORS, _SMALLEST_TENSOR_BYTES, "tensors")
        self.alignment = DEFAULT_ALIGNMENT
        self.metadata = {}
        for _ in range(key_count):
            self._read_pair(cursor)
        self.tensors = {}
        self._read_tensors(cursor, tensor_count)

    def _read_version(self, cursor: HeaderCursor) -> None:
        if cursor.bytes(4) != _MAGIC:
            raise self.corrupt("not a GGUF file")
        self.version = cursor.integer("u32")
        if self.version and self.version % 65_536 == 0:
            raise self.unsupported("big-endian GGUF files are not read")
        if self.version not in (2, 3):
            raise self.unsupported(f"GGUF version {self.version} is not read, only 2 and 3 are")

    def _read_pair(self, cursor: HeaderCursor) -> None:
        key = cursor.string(MAX_KEY_BYTES, "a key")
        if not key or key in self.metadata:
            raise self.corrupt(f"the key {key[:80]!r} appears twice" if key else "a key is empty")
        item = cursor.item_type(key[:80])
        self.metadata[key] = value = cursor.value(item, key[:80])
        if key == "general.alignment":
            if item != "u32" or not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value.bit_count() != 1:
                raise self.corrupt(f"general.alignment is {value!r}, not a power of two up to {MAX_ALIGNMENT}")
            self.alignment = value

    def _read_tensors(self, cursor: HeaderCursor, count: int) -> None:
        """Tensors lie in the order of the table, each at the aligned end of the one before: what every writer does. Insisting
        on it rules out overlaps, and files whose alignment key and data disagree."""
        end = 0
        for _ in range(count):
            tensor = self._read_tensor(cursor)
            expected = self._aligned(end)
            if tensor.offset != expected:
                raise self.corrupt(f"the tensor {tensor.name} begins at {tensor.offset}, not at {expected}")
            end = expected + tensor.bytes
            self.tensors[tensor.name] = tensor
        self.data_start = self._aligned(cursor.position)
        self._check_size(self.data_start + end if count else cursor.position)

    def _check_size(self, end: int) -> None:
        """What follows the last tensor is padding: more means that the alignment key and the data disagree."""
        if not end <= self._file.size <= self._aligned(end):
            raise self.corrupt(f"has {self._file.size} bytes where its tensors need {end}")

    def _read_tensor(self, cursor: HeaderCursor) -> GgufTensor:
        name = cursor.string(MAX_NAME_BYTES, "a tensor's name")
        if not name or name in self.tensors:
            raise self.corrupt(f"the tensor {name!r} appears twice" if name else "a tensor has no name")
        count = cursor.integer("u32")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self.corrupt(f"the tensor {name} has {count} dimensions")
        dims = tuple(cursor.integer("i64") for _ in range(count))
        type_id, offset = cursor.integer("u32"), cursor.integer("u64")
        kind = TYPE_BY_ID.get(type_id)
        if kind is None:
            raise self.unsupported(f"the tensor {name} has the unknown type {type_id}")
        self._check_shape(name, dims, kind)
        return GgufTensor(name, dims, kind, offset)

    def _check_shape(self, name: str, dims: tuple[int, ...], kind: GgufType) -> None:
        if min(dims) < 1 or math.prod(dims) > MAX_ELEMENTS:  # no elements: of no use to a model, so refused as damage
            raise self.corrupt(f"the tensor {name} has the shape {list(dims)}")
        if dims[0] % kind.block_elements:
            raise self.corrupt(f"the tensor {name} has rows of {dims[0]}, not a multiple of {kind.block_elements} ({kind.name})")

    def _aligned(self, position: int) -> int:
        return -(-position // self.alignment) * self.alignment
