"""One HTTP exchange, watched: the work is cancelled when the client goes away, and every failure becomes an answer.

Owns reading the body, the disconnect watch, pings, the register of requests in work, and the rule for errors: before the first byte
a status with JSON, after it an error event and the end of the stream. Not here: what is answered (daemon/api/*). Invariant: a
request leaves the register when its exchange ends; nothing but ErrorInfo reaches a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from daemon.api.errors import Dialect, error_response, json_response, known
from daemon.refusal import REQUEST_ID
from daemon.security import PEER, PeerInfo
from daemon.sse import NDJSON, SSE, Framing
from engine.errors import CavectlError


class Live:
    """A request in work, by the id that its answer's header names."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.reason: CavectlError | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self, reason: CavectlError) -> None:
        """End it with `reason`, which its client is told."""
        if self.reason is None and self._task is not None:
            self.reason = reason
            self._task.cancel()


class LiveRequests:
    def __init__(self) -> None:
        self._by_id: dict[str, Live] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def enter(self, request_id: str) -> Iterator[Live]:
        live = self._by_id[request_id] = Live(request_id)
        self._empty.clear()
        try:
            yield live
        finally:
            del self._by_id[request_id]
            if not self._by_id:
                self._empty.set()

    def cancel(self, request_id: str, reason: CavectlError) -> bool:
        live = self._by_id.get(request_id)
        if live is not None:
            live.cancel(reason)
        return live is not None

    def cancel_all(self, reason: CavectlError) -> None:
        for live in list(self._by_id.values()):
            live.cancel(reason)

    async def wait_empty(self) -> None:
        await self._empty.wait()


class Exchange:
    """What a route works on: the request as it came, and the way back.

    `asked` are the request's headers by lower-case name; `headers` the response's, to be added to until something is sent.
    """

    def __init__(self, request_id: str, scope: Scope, body: bytes, send: Send, framing: Framing) -> None:
        self.id = request_id
        self.body = body
        self.peer: PeerInfo = scope.get("extensions", {}).get(PEER, PeerInfo("tcp"))
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.asked = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.headers: dict[str, str] = {}
        self.framing = framing
        self.streaming = False  # set by the route: pings may be sent before its first event
        self.last_write = time.monotonic()
        self._started = False
        self._send = send
        self._lock = asyncio.Lock()  # a ping never lands between the start and the first event

    async def json(self, body: Any) -> None:
        """The whole answer at once."""
        await self._whole(json_response(body))

    async def text(self, body: str, media_type: str = "text/plain; charset=utf-8") -> None:
        await self._whole(Response(body, media_type=media_type))

    async def _whole(self, response: Response) -> None:
        self._started = True
        headers = response.raw_headers + self._raw_headers()
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": response.body})

    async def event(self, value: Any) -> None:
        await self.write(self.framing.event(value))

    async def write(self, data: bytes) -> None:
        """Bytes of a stream, handed to the socket before this returns."""
        async with self._lock:
            await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self.last_write = time.monotonic()

    async def end(self) -> None:
        async with self._lock:
            await self._start()
            await self._send({"type": "http.response.body", "body": self.framing.end})

    async def fail(self, error: CavectlError) -> None:
        async with self._lock:
            if self._started:
                await self._send({"type": "http.response.body", "body": self.framing.error(error)})
                return
            await self._whole(error_response(error, self.framing.dialect))

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", self.framing.media_type.encode()), (b"cache-control", b"no-cache"), *self._raw_headers()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in self.headers.items()]


Work = Callable[[Exchange], Awaitable[None]]
"""Answers one exchange. Errors are raised."""


class Endpoint:
    """An ASGI application for one route: reads the body, runs the work, watches the client."""

    def __init__(self, work: Work, dialect: Dialect, live: LiveRequests, ping_interval_s: float) -> None:
        self._work, self._live, self._ping_interval_s = work, live, ping_interval_s
        self._framing = SSE if dialect == "openai" else NDJSON

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        request_id: str = scope["extensions"][REQUEST_ID]
        exchange = Exchange(request_id, scope, body, send, self._framing)
        with self._live.enter(request_id) as live:
            work = asyncio.create_task(self._run(exchange, live))
            live.run(work)
            gone = asyncio.create_task(_disconnected(receive))
            ping = asyncio.create_task(self._ping(exchange))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancel(ping, gone, work)

    async def _run(self, exchange: Exchange, live: Live) -> None:
        try:
            await self._work(exchange)
            return
        except asyncio.CancelledError:
            if live.reason is None:
                raise
            error = live.reason
        except Exception as unexpected:
            error = known(unexpected, live.id)
        await exchange.fail(error)

    async def _ping(self, exchange: Exchange) -> None:
        """Keep a quiet stream alive in the eyes of proxies and clients."""
        while self._framing.ping:
            quiet = time.monotonic() - exchange.last_write
            if quiet >= self._ping_interval_s and exchange.streaming:
                await exchange.write(self._framing.ping)
            else:
                await asyncio.sleep(max(0.01, self._ping_interval_s - quiet))


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body (its size is bounded by daemon/protocol.py), None when the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """End tasks and wait for them. What `work` raises is not its client's any more: it has been answered or has left."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await task
