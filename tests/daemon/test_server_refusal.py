"""A refusal of the server and an error of a route look the same to a client, in both dialects."""

from __future__ import annotations

import json

import pytest

from daemon.api import errors
from daemon.refusal import Refusal, body_of, wire_of
from engine.errors import CavectlError, ErrorCode

CODES: list[ErrorCode] = [
    "unauthorized",
    "forbidden",
    "starting",
    "shutting_down",
    "too_many_connections",
    "internal_error",
    "invalid_request",
]


@pytest.mark.parametrize("hint", ["", "do this"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/"])
@pytest.mark.parametrize("code", CODES)
def test_same_shape_as_the_errors_of_routes(code: ErrorCode, path: str, hint: str) -> None:
    error = CavectlError("no", hint=hint, code=code)
    dialect = errors.dialect_of(path)
    refusal = Refusal(errors.status_of(error, dialect), code, "no", hint=hint)
    assert json.loads(body_of(refusal, path)) == errors.body_of(error, dialect)


def test_a_refusal_is_a_whole_response_that_ends_the_connection() -> None:
    refusal = Refusal(431, "too_large", "é", headers=((b"retry-after", b"1"),))
    head, body = wire_of(refusal, "/v1/x", request_id="req-1").split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert {b"connection: close", b"x-request-id: req-1", b"retry-after: 1", b"content-length: %d" % len(body)} <= set(lines)
    assert wire_of(refusal, "/v1/x", request_id="req-1", head_only=True) == head + b"\r\n\r\n"
