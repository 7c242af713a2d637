"""What a request field may hold: small readers that check one JSON value and return it in the form the daemon uses.

Types are strict (true is no number, "5" is no number) and every reader is bounded, so nothing is done per item before the count of
items is known to be small. Errors name the field and what it takes. Which field uses which reader: daemon/api/fields.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from daemon.api.errors import BadField
from daemon.keep_alive import parse_keep_alive
from engine.errors import InvalidRequest

Kind = Literal["honoured", "refused", "no_effect"]

MAX_TEXT_BYTES = 32 << 20  # the whole body's bound


class Reader(Protocol):
    def read(self, path: str, value: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Anything:
    def read(self, path: str, value: Any) -> Any:  # noqa: ARG002
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    def read(self, path: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise BadField(path, f"`{path}` must be true or false")
        return value


@dataclass(frozen=True, slots=True)
class Int:
    low: int
    high: int

    def read(self, path: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise BadField(path, f"`{path}` must be an integer from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Num:
    low: float
    high: float
    above: bool = False  # low itself is out

    def read(self, path: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not self.low <= value <= self.high or (self.above and value == self.low):
            start = f"above {self.low:g}" if self.above else f"from {self.low:g}"
            raise BadField(path, f"`{path}` must be a number {start} to {self.high:g}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Str:
    max_bytes: int = MAX_TEXT_BYTES

    def read(self, path: str, value: Any) -> str:
        if not isinstance(value, str):
            raise BadField(path, f"`{path}` must be a string")
        if len(value) > self.max_bytes or (len(value) * 4 > self.max_bytes and len(value.encode()) > self.max_bytes):
            raise BadField(path, f"`{path}` must have at most {self.max_bytes} bytes")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    def read(self, path: str, value: Any) -> str:
        if value not in self.values or not isinstance(value, str):
            raise BadField(path, f"`{path}` must be one of {', '.join(self.values)}")
        return value


@dataclass(frozen=True, slots=True)
class StopStrings:
    """One string or a list of them; none may be empty, for the empty string is found everywhere."""

    items: int = 16
    max_bytes: int = 256

    def read(self, path: str, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > self.items:
            raise BadField(path, f"`{path}` must be a string or a list of at most {self.items} strings")
        if not all(isinstance(s, str) and s and len(s.encode()) <= self.max_bytes for s in stops):
            raise BadField(path, f"`{path}` must hold strings of 1 to {self.max_bytes} bytes")
        return stops


@dataclass(frozen=True, slots=True)
class TokenIds:
    items: int

    def read(self, path: str, value: Any) -> list[int]:
        if not isinstance(value, list) or len(value) > self.items:
            raise BadField(path, f"`{path}` must be a list of at most {self.items} token ids")
        if not all(type(item) is int and 0 <= item < 1 << 31 for item in value):
            raise BadField(path, f"`{path}` must hold token ids, integers from 0")
        return value


@dataclass(frozen=True, slots=True)
class LogitBias:
    items: int = 1024

    def read(self, path: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > self.items:
            raise BadField(path, f"`{path}` must be an object of at most {self.items} token ids")
        weight = Num(-100, 100)
        return {self._token(path, key): weight.read(f"{path}.{key[:20]}", bias) for key, bias in value.items()}

    def _token(self, path: str, key: str) -> int:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadField(path, f"`{path}` must have token ids as keys")
        return int(key)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    def read(self, path: str, value: Any) -> float:
        try:
            return parse_keep_alive(value)
        except InvalidRequest as error:
            raise BadField(path, error.message, hint=error.hint) from None


@dataclass(frozen=True, slots=True)
class Prompts:
    """A string, a list of strings, a list of token ids, or a list of such lists: always returned as a list of prompts."""

    items: int = 64
    tokens: int = 1 << 20

    def read(self, path: str, value: Any) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise BadField(path, f"`{path}` must be a string, a list of strings, or token ids")
        if type(value[0]) is int:
            return [TokenIds(self.tokens).read(path, value)]
        if len(value) > self.items:
            raise BadField(path, f"`{path}` must hold at most {self.items} prompts")
        if all(isinstance(item, str) for item in value):
            return list(value)
        return [TokenIds(self.tokens).read(f"{path}[{i}]", item) for i, item in enumerate(value)]


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a dialect's table.

    honoured: read and used. refused: would change the answer and is not offered, so only `neutral` values pass. no_effect: changes
    at most where or how fast a request runs; read for its type, then named to the client as ignored.
    """

    name: str
    reader: Reader = field(default_factory=Anything)
    kind: Kind = "honoured"
    neutral: tuple[Any, ...] = ()
    nullable: bool = True
    required: bool = False


@dataclass(slots=True)
class Nested:
    """What a reader of objects returns to the table around it: its value, and the names in it that have no effect."""

    value: Any
    ignored: list[str]


@dataclass(slots=True)
class Fields:
    """The values of a request's fields, read and checked. `ignored`: names of given fields that have no effect."""

    values: dict[str, Any]
    ignored: list[str]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of several spellings that was given."""
        return next((self.values[name] for name in names if name in self.values), default)


@dataclass(frozen=True, slots=True)
class Table:
    """A closed object: a key that no row names is refused."""

    rows: Mapping[str, Field]

    @classmethod
    def of(cls, *groups: Sequence[Field]) -> Table:
        rows = [row for group in groups for row in group]
        assert len({row.name for row in rows}) == len(rows)
        return cls({row.name: row for row in rows})

    def read(self, path: str, value: Any) -> Nested:
        fields = self.read_fields(path, value)
        return Nested(fields.values, fields.ignored)

    def read_fields(self, path: str, value: Any) -> Fields:
        if not isinstance(value, dict):
            raise BadField(path, f"`{path}` must be an object")
        result = Fields({}, [])
        for name, item in value.items():
            self._read_one(f"{path}.{name}" if path else name, name, item, result)
        for row in self.rows.values():
            if row.required and row.name not in result.values:
                missing = f"{path}.{row.name}" if path else row.name
                raise BadField(missing, f"`{missing}` is missing")
        return result

    def _read_one(self, path: str, name: str, item: Any, result: Fields) -> None:
        row = self.rows.get(name)
        if row is None:
            raise BadField(path[:200], f"`{path[:200]}` is not a field of this request", code="unknown_field")
        if item is None and row.nullable and not row.required:
            return
        if row.kind == "refused":
            if not any(item == value and type(item) is type(value) for value in row.neutral):
                raise BadField(path, f"`{path}` is not supported", hint="leave the field out", code="unsupported")
            return
        value = row.reader.read(path, item)
        if row.kind == "no_effect":
            result.ignored.append(path)
        elif isinstance(value, Nested):
            result.values[name] = value.value
            result.ignored += value.ignored
        else:
            result.values[name] = value
