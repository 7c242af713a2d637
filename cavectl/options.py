"""Sampling options by name, as `run -o key=value` and the chat's /set parameter take them.

Names and meaning are those of the `options` object of /api/chat. A name or value that is wrong is refused here, before a model
loads; whether a value is in range is for the daemon to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from engine.errors import InvalidRequest

OPTION_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repeat_penalty": float,
        "repetition_penalty": float,
        "repeat_last_n": int,
        "presence_penalty": float,
        "frequency_penalty": float,
        "seed": int,
        "num_predict": int,
        "num_ctx": int,
        "stop": str,
    }
)
_KINDS = {float: "a number", int: "a whole number"}


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
    """Read one value by the type of its key and put it into `options`."""
    if key not in OPTION_TYPES:
        from difflib import get_close_matches

        near = get_close_matches(key, OPTION_TYPES, n=1)
        raise InvalidRequest(
            f"no option {key!r}", hint=f"did you mean {near[0]}?" if near else f"there are: {', '.join(OPTION_TYPES)}"
        )
    kind = OPTION_TYPES[key]
    if kind is str:
        options.setdefault(key, []).append(value)
        return
    try:
        options[key] = kind(value)
    except ValueError:
        raise InvalidRequest(f"{key} is {_KINDS[kind]}, not {value!r}", hint=f"for example -o {key}=1") from None
