"""Every stable error code has an exit code, and the codes of design.md mean what they say."""

from __future__ import annotations

from typing import get_args

import pytest

from cavectl.exit_codes import EXIT_CODES, ExitCode, exit_code
from engine.errors import ErrorCode


def test_the_table_is_complete() -> None:
    assert set(EXIT_CODES) == set(get_args(ErrorCode))


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("invalid_request", 2),
        ("model_not_found", 3),
        ("daemon_unreachable", 4),
        ("out_of_memory", 5),
        ("context_length_exceeded", 6),
        ("network_error", 7),
        ("hub_rate_limited", 7),
        ("device_unavailable", 8),
        ("internal_error", 1),
        ("a code of a later version", 1),
    ],
)
def test_codes(code: str, number: int) -> None:
    assert exit_code(code) == number


def test_signals_follow_the_shells_rule() -> None:
    assert (ExitCode.INTERRUPTED, ExitCode.TERMINATED) == (128 + 2, 128 + 15)
