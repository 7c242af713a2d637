"""S21: what is not strictly one JSON object is refused, in linear time, and nothing else is."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api.body import MAX_DEPTH, check_depth, read_object
from engine.errors import InvalidRequest

REFUSED = {
    "empty": b"",
    "blanks": b" \n ",
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "number": b"1",
    "trailing garbage": b"{} x",
    "two objects": b"{}{}",
    "cut": b'{"a": [1, 2',
    "comment": b"{/**/}",
    "single quotes": b"{'a': 1}",
    "trailing comma": b'{"a": 1,}',
    "control character": b'{"a": "\x01"}',
    "bad byte": b'{"a": "\xff"}',
    "overlong": b'{"a": "\xc0\xaf"}',
    "encoded surrogate": b'{"a": "\xed\xa0\x80"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "lone high surrogate": b'{"a": "\\ud800"}',
    "lone low surrogate": b'{"a": "x\\udc00y"}',
    "reversed surrogates": b'{"a": "\\udc00\\ud800"}',
    "surrogate in a key": b'{"\\ud800": 1}',
    "surrogate deep inside": b'{"a": [{"b": ["\\ud800"]}]}',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "overflowing float": b'{"a": 1e999}',
    "65 bits": b'{"a": 18446744073709551616}',
    "below 64 bits": b'{"a": -9223372036854775809}',
    "5000 digits": b'{"a": ' + b"7" * 5000 + b"}",
    "leading zero": b'{"a": 01}',
    "duplicate key": b'{"messages": 1, "messages": 2}',
    "duplicate by escape": b'{"a": 1, "\\u0061": 2}',
    "duplicate inside": b'{"a": [{"b": 1, "b": 1}]}',
    "deep arrays": b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "deep objects": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "open brackets": b"[" * 10**6,
    "mixed open brackets": b'[{"a":' * 10**5,
    "too many brackets": b'{"a": [' + b"[]," * 300_000 + b"[]]}",
}

TAKEN = {
    "empty object": (b" {} \n", {}),
    "brackets in a string": (b'{"a": "[[[[{{{{\\"[["}', {"a": '[[[[{{{{"[['}),
    "escaped backslash before a quote": (b'{"a": "x\\\\", "b": ["\\\\\\""]}', {"a": "x\\", "b": ['\\"']}),
    "surrogate pair": (b'{"a": "\\ud83d\\ude42"}', {"a": "\U0001f642"}),
    "spelled escape": (b'{"a": "\\\\ud800"}', {"a": "\\ud800"}),
    "64 bits": (b'{"a": [18446744073709551615, -9223372036854775808]}', {"a": [2**64 - 1, -(2**63)]}),
    "deepest": (b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH, None),
}


@pytest.mark.timing
@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED.keys())
def test_refused(raw: bytes) -> None:
    started = time.perf_counter()
    with pytest.raises(InvalidRequest) as caught:
        read_object(raw)
    assert time.perf_counter() - started < 2
    assert "\n" not in caught.value.message and len(caught.value.message) < 200


@pytest.mark.parametrize(("raw", "value"), TAKEN.values(), ids=TAKEN.keys())
def test_taken(raw: bytes, value: object) -> None:
    assert read_object(raw) == (value if value is not None else json.loads(raw))


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(
    st.recursive(
        st.text('"\\[]{}a\u00e9') | st.integers(0, 9) | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\[{a'), inner, max_size=3),
        max_leaves=40,
    ),
    st.integers(0, 70),
)
def test_depth_is_the_depth(value: object, around: int) -> None:
    for _ in range(around):
        value = [value]
    raw = json.dumps(value, ensure_ascii=False).encode()
    if depth(value) <= MAX_DEPTH:
        check_depth(raw)
    else:
        with pytest.raises(InvalidRequest, match="deeper"):
            check_depth(raw)
