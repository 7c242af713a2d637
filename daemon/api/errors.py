"""How an error looks to a client: HTTP status by code, and one body shape per dialect.

Invariant: nothing but `ErrorInfo` is ever shown. An exception that is not of our family becomes `internal_error` with the request's
id; its traceback goes to the log and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from engine.errors import CavectlError, ErrorCode, InvalidRequest

log = logging.getLogger("cavectl.api")

Dialect = Literal["openai", "ollama"]

STATUS: Mapping[ErrorCode, int] = {
    "invalid_request": 400,
    "unknown_field": 400,
    "unsupported": 400,
    "invalid_name": 400,
    "model_not_found": 404,
    "model_exists": 409,
    "context_length_exceeded": 400,
    "out_of_memory": 503,
    "unsupported_model": 400,
    "unsupported_tokenizer": 400,
    "corrupt_file": 500,
    "hash_mismatch": 502,
    "no_space": 507,
    "no_process": 503,
    "network_error": 502,
    "hub_unauthorized": 502,
    "hub_not_found": 404,
    "hub_rate_limited": 503,
    "queue_full": 429,
    "worker_died": 503,
    "worker_timeout": 503,
    "engine_error": 500,
    "template_error": 400,
    "template_timeout": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "too_large": 413,
    "timeout": 408,
    "cancelled": 499,
    "request_not_found": 404,
    "starting": 503,
    "shutting_down": 503,
    "too_many_connections": 503,
    "device_unavailable": 503,
    "daemon_unreachable": 503,
    "daemon_running": 409,
    "store_error": 500,
    "internal_error": 500,
}

_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class BadField(InvalidRequest):
    """A request field that cannot be taken, by name (a dotted path from the top of the body)."""

    def __init__(self, param: str, message: str, *, hint: str = "", code: ErrorCode | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.param = param


class Busy(CavectlError):
    """The request may be sent again after `retry_after_s`."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


def known(error: BaseException, request_id: str) -> CavectlError:
    """`error` itself if it is meant for people, else an `internal_error` that says nothing of its cause."""
    if isinstance(error, CavectlError):
        return error
    log.error("request %s: unexpected %s", request_id, type(error).__name__, exc_info=error)
    return CavectlError(
        "something went wrong inside the daemon",
        hint=f"`cavectl daemon logs` has the details under {request_id}",
        code="internal_error",
    )


def status_of(error: CavectlError, dialect: Dialect) -> int:
    if error.code == "queue_full" and dialect == "ollama":
        return 503
    return STATUS[error.code]


def body_of(error: CavectlError, dialect: Dialect) -> dict[str, Any]:
    hint = {"hint": error.hint} if error.hint else {}
    if dialect == "ollama":
        return {"error": error.message, "code": error.code} | hint
    status = status_of(error, dialect)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    inner = {"message": error.message, "type": kind, "param": getattr(error, "param", None), "code": error.code}
    return {"error": inner | hint}


def error_response(error: CavectlError, dialect: Dialect) -> Response:
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Busy) else None
    return json_response(body_of(error, dialect), status_of(error, dialect), headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def dialect_of(path: str) -> Dialect:
    return "openai" if path.startswith("/v1/") else "ollama"
