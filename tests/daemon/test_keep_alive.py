"""B21: keep_alive in every spelling that clients use; what is not understood is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from daemon.keep_alive import parse_keep_alive
from engine.errors import InvalidRequest


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (-1, math.inf),
        (-0.5, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("-1h30m", math.inf),
        (0, 0),
        ("0", 0),
        ("0s", 0),
        ("-0", 0),
        (300, 300),
        (0.25, 0.25),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("+2s", 2),
        ("500ms", 0.5),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        (" 5m ", 300),
    ],
)
def test_understood(value: Any, seconds: float) -> None:
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [
        *("abc", "", "5 m", "5x", "m", "--1", "-", "1h-5m", "5m30", "1e3", "inf", "NaN", "０", "9" * 65, "1e308"),
        *(1e308, 10**18, math.nan, math.inf, None, True, False, [], {}, ["5m"]),
    ],
)
def test_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        parse_keep_alive(value)
