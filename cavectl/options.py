"""Sampling options by name, as `run -o key=value`, its flags and the chat's /set parameter take them.

Names, meaning and ranges are those of the `options` object of /api/chat; a test compares them with the daemon's table, which takes
too long to import. Invariant: a name or number that is wrong is refused here, before a model loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.errors import InvalidRequest

_MAX_INT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Number:
    """The numbers that an option takes, from `low` to `high`."""

    kind: type[int] | type[float]
    low: float
    high: float
    above: bool = False  # low itself is out

    def holds(self, value: float) -> bool:
        """False for NaN too."""
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} {'above' if self.above else 'from'} {self.low} to {self.high}"


OPTIONS: Mapping[str, Number | None] = MappingProxyType(  # None: text, and may come several times
    {
        "temperature": Number(float, 0, 100),
        "top_k": Number(int, -1, _MAX_INT),
        "top_p": Number(float, 0, 1),
        "min_p": Number(float, 0, 1),
        "repeat_penalty": Number(float, 0, 10, above=True),
        "repetition_penalty": Number(float, 0, 10, above=True),
        "repeat_last_n": Number(int, -1, _MAX_INT),
        "presence_penalty": Number(float, -2, 2),
        "frequency_penalty": Number(float, -2, 2),
        "seed": Number(int, -(1 << 63), (1 << 64) - 1),
        "num_predict": Number(int, -2, _MAX_INT),
        "num_ctx": Number(int, 1, _MAX_INT),
        "stop": None,
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"max_tokens": "num_predict"})


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Options of the form key=value; `stop` may come several times."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"not of the form key=value: {pair}", hint="for example -o temperature=0.2")
        set_option(options, key.strip(), value)
    return options


def set_option(options: dict[str, Any], key: str, value: str) -> None:
    """Read one value by the kind of its key and put it into `options`."""
    name = ALIASES.get(key, key)
    if name not in OPTIONS:
        raise InvalidRequest(f"no option {key!r}", hint=_nearest(key))
    number = OPTIONS[name]
    if number is None:
        options.setdefault(name, []).append(value)
        return
    try:
        read = number.kind(value)
    except ValueError:
        raise InvalidRequest(f"{key} is {number}, not {value!r}", hint=f"for example -o {key}=1") from None
    options[name] = _checked(number, key, read, f"-o {key}=1")


def set_flag(options: dict[str, Any], flag: str, name: str, value: float | None) -> None:
    """Put the number of a command's own flag into `options`, unless the flag was not given."""
    number = OPTIONS[name]
    if value is not None and number is not None:
        options[name] = _checked(number, flag, value, f"{flag} 1")


def _checked(number: Number, name: str, value: float, example: str) -> float:
    if not number.holds(value):
        raise InvalidRequest(f"{name} is {number}, not {value}", hint=f"for example {example}")
    return value


def _nearest(key: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key, [*OPTIONS, *ALIASES], n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(OPTIONS)}"
