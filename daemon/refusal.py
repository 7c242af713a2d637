"""Refusals of the server itself: what connection rules, security rules and the start-up gate answer instead of a route.

Owns the ids of requests, and the shape of refusals on the wire, which follows the dialect of the path: OpenAI's under /v1, Ollama's
elsewhere. Errors of routes are in daemon/api/errors.py; both give the same shapes. Light on purpose: it is imported before
anything heavy.
"""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.errors import ErrorCode

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

Headers = tuple[tuple[bytes, bytes], ...]


REQUEST_ID = "cavectl.request_id"
"""Key of the request's id in scope["extensions"]; every answer names it."""


def new_request_id() -> str:
    """Not to be guessed: whoever names it may cancel the request."""
    return f"req-{os.urandom(12).hex()}"


def id_header(request_id: str) -> tuple[bytes, bytes]:
    return (b"x-request-id", request_id.encode())


class Refusal(Exception):
    """One answer that needs no route: a status, a stable code, a one-line message for the client, and extra headers."""

    def __init__(self, status: int, code: ErrorCode, message: str, *, hint: str = "", headers: Headers = ()) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint, self.headers = status, code, message, hint, headers


def body_of(refusal: Refusal, path: str) -> bytes:
    """The JSON body of `refusal` for a request to `path` ("" when no request line was read)."""
    shown: dict[str, Any]
    if path == "/v1" or path.startswith("/v1/"):
        kind = _OPENAI_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
        shown = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
        shown = {"error": shown | ({"hint": refusal.hint} if refusal.hint else {})}
    else:
        shown = {"error": refusal.message, "code": refusal.code} | ({"hint": refusal.hint} if refusal.hint else {})
    return json.dumps(shown, ensure_ascii=False).encode()


def wire_of(refusal: Refusal, path: str = "", *, request_id: str, head_only: bool = False) -> bytes:
    """A whole HTTP/1.1 response that also announces the end of the connection."""
    body = body_of(refusal, path)
    lines = [b"HTTP/1.1 %d %s" % (refusal.status, HTTPStatus(refusal.status).phrase.encode())]
    lines += [b"%s: %s" % header for header in (*_headers(refusal, body), id_header(request_id))]
    return b"\r\n".join([*lines, b"connection: close", b"", b"" if head_only else body])


async def send_refusal(send: Any, refusal: Refusal, path: str, extra: Headers = ()) -> None:
    """The same response, sent through ASGI on a connection that stays open."""
    body = body_of(refusal, path)
    await send({"type": "http.response.start", "status": refusal.status, "headers": [*_headers(refusal, body), *extra]})
    await send({"type": "http.response.body", "body": body})


def _headers(refusal: Refusal, body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *refusal.headers]
