"""Who may ask: Host, Origin, content type and key rules (S16, S17, S18), as pure ASGI middleware around every route.

On TCP the Host must be one we are known by, so that a page whose name was rebound to this machine gets nothing; and with a key
set, every path but /health needs it. On the Unix socket the kernel already named the peer's user (protocol.py refuses others), so
neither applies. Rules against browsers apply everywhere. Decides on headers alone: no body is read, and nothing behind it runs
for a refused request.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from daemon.config import Settings
from daemon.refusal import Headers, Refusal, send_refusal

OPEN_PATHS = frozenset({"/health", "/healthz"})
"""Answered without a key, so that a supervisor needs none."""

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "host.docker.internal"})

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(?::([0-9]{1,5}))?")
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
_BROWSER_HEADERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-fetch-user"})

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who is at the other end: a user on this machine's Unix socket, or an address on TCP; and with which key, if any.

    `key` is the start of the key's digest, never the key.
    """

    kind: Literal["unix", "tcp"]
    uid: int | None = None
    address: str | None = None
    key: str | None = None


KEY_DIGITS = 16  # of a key's digest, which tell clients apart

PEER = "cavectl.peer"
"""Key of the PeerInfo in scope["extensions"]."""


class SecurityMiddleware:
    """Wraps `app`; refuses what the rules above refuse, and adds the CORS answer for origins that the user listed."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.hosts = LOCAL_HOSTS | _bound_hosts(settings.host) | {host.lower() for host in settings.allowed_hosts}
        self.origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)
        self.key = _digest(settings.api_key.encode()) if settings.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        path, cors = scope["path"], ()
        try:
            extensions = scope.setdefault("extensions", {})
            peer = extensions.get(PEER, PeerInfo("tcp"))
            tcp = peer.kind == "tcp"
            if tcp:
                self._check_host(_values(scope, b"host"))
            cors = self._check_origin(scope)
            if cors and _is_preflight(scope):
                await _answer_preflight(scope, send, cors)
                return
            if self.key is not None and self._has_key(scope):
                extensions[PEER] = replace(peer, key=self.key.hex()[:KEY_DIGITS])
            elif self.key is not None and tcp and path not in OPEN_PATHS:
                raise _no_key()
        except Refusal as refusal:
            await send_refusal(send, refusal, path, cors)
            return
        await self.app(scope, receive, _with_headers(send, cors) if cors else send)

    def _check_host(self, values: Sequence[bytes]) -> None:
        if len(values) != 1 or not values[0]:
            raise Refusal(400, "invalid_request", "a request needs exactly one Host header")
        match = _HOST.fullmatch(values[0].decode("latin-1").lower())
        if match is None or not 0 < int(match[2] or 1) < 65536:
            raise Refusal(400, "invalid_request", "the Host header is not a host and a port")
        if match[1] not in self.hosts:
            hint = "add it to allowed_hosts if this daemon should answer to that name"
            raise Refusal(403, "forbidden", "this daemon is not known by that Host", hint=hint)

    def _check_origin(self, scope: Scope) -> Headers:
        """Refuses what a browser may not do. Returns the CORS headers for a listed origin, else ()."""
        origins = _values(scope, b"origin")
        listed = len(origins) == 1 and self._is_listed(origins[0].decode("latin-1").lower())
        if origins and not listed:
            hint = "list it in allowed_origins if pages from there should use this daemon"
            raise Refusal(403, "forbidden", "requests from that origin are refused", hint=hint)
        if not listed and b"cross-site" in _values(scope, b"sec-fetch-site"):
            raise Refusal(403, "forbidden", "requests from pages of other sites are refused")
        cors: Headers = ((b"access-control-allow-origin", origins[0]), (b"vary", b"Origin")) if listed else ()
        if scope["method"] not in _BODILESS and _from_browser(scope) and not _is_json(_values(scope, b"content-type")):
            raise Refusal(415, "unsupported", "a browser must send Content-Type: application/json", headers=cors)
        return cors

    def _is_listed(self, origin: str) -> bool:
        return origin in self.origins or ("*" in self.origins and origin != "null")

    def _has_key(self, scope: Scope) -> bool:
        assert self.key is not None
        matches = [hmac.compare_digest(_digest(candidate), self.key) for candidate in _candidates(scope)]
        return any(matches)  # after all were compared


def _no_key() -> Refusal:
    challenge = ((b"www-authenticate", b"Bearer"),)
    return Refusal(401, "unauthorized", "this daemon needs its API key", hint="send Authorization: Bearer KEY", headers=challenge)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bound_hosts(host: str) -> frozenset[str]:
    """The address that the user chose to listen on is a name that clients use; the wildcard addresses are none."""
    if host.strip("[]") in {"", "0.0.0.0", "::"}:  # noqa: S104
        return frozenset()
    return frozenset({f"[{host.strip('[]')}]" if ":" in host else host.lower()})


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value.strip() for key, value in scope["headers"] if key == name]


def _candidates(scope: Scope) -> list[bytes]:
    """Every key that the request carries, in any of the headers that clients use."""
    bearers = [value[7:].strip() for value in _values(scope, b"authorization") if value[:7].lower() == b"bearer "]
    return bearers + _values(scope, b"x-api-key") + _values(scope, b"api-key")


def _from_browser(scope: Scope) -> bool:
    return any(name in _BROWSER_HEADERS for name, _value in scope["headers"])


def _is_json(types: Sequence[bytes]) -> bool:
    return len(types) == 1 and types[0].split(b";")[0].strip().lower() == b"application/json"


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and bool(_values(scope, b"access-control-request-method"))


async def _answer_preflight(scope: Scope, send: Send, cors: Headers) -> None:
    headers = [
        *cors,
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, DELETE"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key, api-key, x-cavectl-priority"),
        (b"access-control-max-age", b"600"),
    ]
    if _values(scope, b"access-control-request-private-network"):
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _with_headers(send: Send, extra: Headers) -> Send:
    async def wrapped(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return wrapped
