"""Reads the primitive values of a GGUF header, never past its end.

Owned here: numbers, strings and arrays of GGUF, with their caps. Not here: the order in which a header holds them (gguf.py).
Invariant: every length and count is compared with the bytes that remain before anything is read or allocated for it, so reading
takes time in proportion to the header, whatever the header claims. Arrays are walked, not decoded: that happens on demand.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from engine.errors import CorruptFile

MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 1 << 22

ItemType = Literal["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"]
Scalar = str | int | float | bool

_ITEM_TYPES: tuple[ItemType, ...] = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_NUMBERS: Mapping[ItemType, struct.Struct] = {
    "u8": struct.Struct("<B"),
    "i8": struct.Struct("<b"),
    "u16": struct.Struct("<H"),
    "i16": struct.Struct("<h"),
    "u32": struct.Struct("<I"),
    "i32": struct.Struct("<i"),
    "f32": struct.Struct("<f"),
    "bool": struct.Struct("<B"),
    "u64": struct.Struct("<Q"),
    "i64": struct.Struct("<q"),
    "f64": struct.Struct("<d"),
}
_LENGTH = _NUMBERS["u64"]


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array as it lies in the header: known to fit, not yet decoded."""

    item: ItemType
    count: int
    offset: int


class HeaderCursor:
    """A position in a mapped header. `corrupt` makes the error that names the file."""

    def __init__(self, header: mmap.mmap, position: int, corrupt: Callable[[str], CorruptFile]) -> None:
        self.position = position
        self._header = header
        self._end = len(header)
        self._corrupt = corrupt

    def take(self, length: int) -> int:
        """Where the next `length` bytes begin; the position moves behind them."""
        start = self.position
        if length > self._end - start:
            raise self._corrupt("the header ends early")
        self.position = start + length
        return start

    def bytes(self, length: int) -> bytes:
        start = self.take(length)
        return self._header[start : start + length]

    def number(self, item: ItemType) -> int | float | bool:
        form = _NUMBERS[item]
        (value,) = form.unpack_from(self._header, self.take(form.size))
        if item == "bool":
            if value > 1:
                raise self._corrupt("a boolean is neither 0 nor 1")
            return value == 1
        return value

    def integer(self, item: Literal["u32", "u64", "i64"]) -> int:
        return int(self.number(item))

    def string(self, max_bytes: int, what: str) -> str:
        length = self.integer("u64")
        if length > max_bytes:
            raise self._corrupt(f"{what} claims {length} bytes")
        return self._decode(self.bytes(length), what)

    def item_type(self, what: str) -> ItemType:
        number = self.integer("u32")
        if number >= len(_ITEM_TYPES):
            raise self._corrupt(f"{what} has the unknown type {number}")
        return _ITEM_TYPES[number]

    def value(self, item: ItemType, key: str) -> Scalar | GgufArray:
        if item == "string":
            return self.string(MAX_STRING_BYTES, key)
        return self._array(key) if item == "array" else self.number(item)

    def check_count(self, count: int, limit: int, item_bytes: int, what: str) -> None:
        """Refuses a count that is negative, above its cap, or more than the remaining bytes can hold."""
        if not 0 <= count <= limit or count * item_bytes > self._end - self.position:
            raise self._corrupt(f"the header claims {count} {what}")

    def items(self, array: GgufArray, key: str) -> list[str] | list[int] | list[float]:
        """Decodes an array that `value` has walked."""
        if array.item == "string":
            return self._strings(array, key)
        form = _NUMBERS[array.item].format[1:]
        return list(struct.unpack_from(f"<{array.count}{form}", self._header, array.offset))

    def _array(self, key: str) -> GgufArray:
        item = self.item_type(key)
        if item == "array":
            raise self._corrupt(f"{key} is an array of arrays")
        count = self.integer("u64")
        item_bytes = _LENGTH.size if item == "string" else _NUMBERS[item].size
        self.check_count(count, MAX_ARRAY_ITEMS, item_bytes, f"items in {key}")
        array = GgufArray(item, count, self.position)
        if item == "string":
            self._skip_strings(count, key)
        else:
            self.take(count * item_bytes)
        return array

    def _skip_strings(self, count: int, key: str) -> None:
        position, last, header, unpack = self.position, self._end - _LENGTH.size, self._header, _LENGTH.unpack_from
        for _ in range(count):
            if position > last:
                raise self._corrupt(f"{key} runs past the end of the header")
            (length,) = unpack(header, position)
            position += length + 8
        if position > self._end:
            raise self._corrupt(f"{key} runs past the end of the header")
        self.position = position

    def _strings(self, array: GgufArray, key: str) -> list[str]:
        position, header, unpack = array.offset, self._header, _LENGTH.unpack_from
        found = []
        try:
            for _ in range(array.count):
                start = position + 8
                position = start + unpack(header, position)[0]
                found.append(header[start:position].decode())
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{key} holds a string that is not UTF-8") from error
        return found

    def _decode(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8") from error
