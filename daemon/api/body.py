"""Reading a JSON request body strictly: what two readers could understand differently is refused here.

UTF-8 without a mark, one object, depth at most 64, integers of at most 64 bits, finite numbers, no key twice, no lone surrogate.
Invariant: linear time and memory, and no recursion deeper than the bound. Meaning of fields: daemon/api/fields.py.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from engine.errors import InvalidRequest

MAX_DEPTH = 64
MAX_BRACKETS = 1 << 18  # arrays and objects of one body
INTEGER_DIGITS = 20  # of 2^64 - 1

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_object(raw: bytes) -> dict[str, Any]:
    """The body as a dict of plain Python values. Raises InvalidRequest."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: bad byte at offset {error.start}") from None
    if text.startswith("\ufeff"):
        raise InvalidRequest("the body starts with a byte order mark", hint="send plain UTF-8")
    if not text.strip():
        raise InvalidRequest("the body is empty, a JSON object is needed")
    check_depth(raw)
    body = _decode(text)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def check_depth(raw: bytes) -> None:
    """Refuse nesting beyond MAX_DEPTH before a recursive reader sees it, with bytes operations only.

    Outside strings only brackets are kept; each round then takes away the innermost pairs, so rounds count the depth.
    """
    outside = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = outside.translate(_BRACKETS, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_BRACKETS:
        raise InvalidRequest(f"the body has more than {MAX_BRACKETS} arrays and objects")
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            raise InvalidRequest("the body is not valid JSON: brackets do not match")
        brackets = shorter
    if brackets:
        raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _decode(text: str) -> Any:
    try:
        body = json.loads(
            text, parse_int=_integer, parse_float=_finite, parse_constant=_constant, object_pairs_hook=_without_duplicates
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg.lower()} at offset {error.pos}") from None
    if "\\u" in text:
        _refuse_surrogates(body)
    return body


def _integer(digits: str) -> int:
    if len(digits) <= INTEGER_DIGITS + 1:
        value = int(digits)
        if -(1 << 63) <= value < 1 << 64:
            return value
    raise InvalidRequest("an integer of the body does not fit in 64 bits")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise InvalidRequest("a number of the body is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not valid JSON: {name} is not a JSON number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InvalidRequest(f"the body has the key {twice[:64]!r} twice in one object")
    return result


def _refuse_surrogates(value: Any) -> None:
    """Half of a surrogate pair, written as an escape, is text that cannot be encoded."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise InvalidRequest("the body has half of a surrogate pair")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)
