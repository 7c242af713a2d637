"""HTTP/1.1 to the daemon, over its Unix socket or over TCP.

Every request has its own connection: closing it is how a request is cancelled. A stream gives each JSON line when it has arrived,
never waiting for more. Whatever goes wrong becomes a CavectlError with the daemon's code, or `daemon_unreachable`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from engine.errors import CavectlError, ErrorCode, InvalidRequest

DEFAULT_PORT = 11435
_ANSWER_TIMEOUT_S = 60.0  # for an answer that is one document; streams wait as long as it takes
_CONNECT_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16


class Client:
    """One daemon, at a socket path or at a URL (exactly one of them)."""

    def __init__(self, *, socket_path: str = "", url: str = "", api_key: str = "") -> None:
        self._socket_path = socket_path
        self._url = url if "://" in url or not url else f"http://{url}"
        self._api_key = api_key

    @property
    def place(self) -> str:
        """Where this client looks, for messages."""
        return self._url or self._socket_path

    def get(self, path: str) -> Any:
        return self._document("GET", path, None)

    def post(self, path: str, body: Any, *, timeout_s: float | None = _ANSWER_TIMEOUT_S) -> Any:
        return self._document("POST", path, body, timeout_s)

    def delete(self, path: str, body: Any) -> Any:
        return self._document("DELETE", path, body)

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """POST and give the lines of the answer as they arrive. Leaving the block closes the connection."""
        connection = self._connection()
        try:
            yield _lines(self._send(connection, "POST", path, body, None), self.place)
        finally:
            connection.close()

    def _document(self, method: str, path: str, body: Any, timeout_s: float | None = _ANSWER_TIMEOUT_S) -> Any:
        connection = self._connection()
        try:
            data = _read(self._send(connection, method, path, body, timeout_s), self.place)
        finally:
            connection.close()
        return _decode(data) if data.strip() else {}

    def _send(self, connection: HTTPConnection, method: str, path: str, body: Any, timeout_s: float | None) -> HTTPResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._api_key and self._url:
            headers["Authorization"] = f"Bearer {self._api_key}"
        payload = None if body is None else msgspec.json.encode(body)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise _unreachable(self.place, error) from error
        if response.status >= 400:
            raise _refusal(response.status, _read(response, self.place))
        return response

    def _connection(self) -> HTTPConnection:
        if not self._url:
            return _UnixConnection(self._socket_path)
        parts = urlsplit(self._url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https"):
            raise InvalidRequest(f"not a URL of a daemon: {self._url}", hint="for example http://127.0.0.1:11435")
        if parts.scheme == "https":
            return HTTPSConnection(host, port or 443, timeout=_CONNECT_TIMEOUT_S)
        return HTTPConnection(host, port or DEFAULT_PORT, timeout=_CONNECT_TIMEOUT_S)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CONNECT_TIMEOUT_S)
        self.sock.connect(self._path)


def _read(response: HTTPResponse, place: str) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise _broken(place) from error


def _lines(response: HTTPResponse, place: str) -> Iterator[dict[str, Any]]:
    """JSON objects, one a line. read1 returns what is there, so a line is given as soon as its newline is."""
    pending = b""
    while True:
        try:
            data = response.read1(_READ_BYTES)
        except (OSError, HTTPException) as error:
            raise _broken(place) from error
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if line.strip():
                yield _event(line)
    if pending.strip():
        yield _event(pending)


def _event(line: bytes) -> dict[str, Any]:
    event = _decode(line)
    if not isinstance(event, dict):
        raise _nonsense()
    if "error" in event:
        raise _error_of(event, "internal_error")
    return event


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise _nonsense() from None


def _refusal(status: int, data: bytes) -> CavectlError:
    fallback: ErrorCode = "unauthorized" if status == 401 else "forbidden" if status == 403 else "internal_error"
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        body = None
    if not isinstance(body, dict) or "error" not in body:
        return CavectlError(f"the daemon answered with status {status}", hint="is it a cavectl daemon?", code=fallback)
    return _error_of(body, fallback)


def _error_of(body: dict[str, Any], fallback: ErrorCode) -> CavectlError:
    """An error in either wire form: {"error": "text", "code", "hint"} or {"error": {"message", "code", "hint"}}."""
    fields = body["error"] if isinstance(body["error"], dict) else {**body, "message": body["error"]}
    code = fields.get("code")
    message = str(fields.get("message") or "the daemon gave no reason")
    return CavectlError(message, hint=str(fields.get("hint") or ""), code=code if code in get_args(ErrorCode) else fallback)


def _unreachable(place: str, error: Exception) -> CavectlError:
    if isinstance(error, TimeoutError):
        return CavectlError(f"the daemon at {place} does not answer", hint="cavectl daemon status", code="daemon_unreachable")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return CavectlError(f"no daemon answers at {place} ({reason})", hint="cavectl daemon start", code="daemon_unreachable")


def _broken(place: str) -> CavectlError:
    return CavectlError(
        f"the daemon at {place} closed the connection before its answer was complete",
        hint="cavectl daemon logs",
        code="daemon_unreachable",
    )


def _nonsense() -> CavectlError:
    return CavectlError("the daemon's answer is not JSON", hint="is it a cavectl daemon?", code="internal_error")
