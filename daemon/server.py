"""The HTTP server of the daemon: one uvicorn Server on a Unix socket and a TCP socket, and the gate in front of the routes.

The gate answers /health from the first moment, while the application (daemon/app.py and everything heavy behind it) is imported and
started in the background; requests for routes wait for it, bounded, and get 503 `starting` when it takes longer. On shutdown the
listeners close, streams finish within the drain time and are ended by the application after it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import uvicorn

from daemon.config import Settings
from daemon.connections import Connections
from daemon.platform import raise_file_limit
from daemon.protocol import Connection
from daemon.refusal import Refusal, body_of, send_refusal
from daemon.security import App, Receive, Scope, SecurityMiddleware, Send

log = logging.getLogger("daemon.server")

END_TIMEOUT_S = 5.0
"""How long the application has to end its streams and models once the drain time is over, and clients to read the end."""

FILES_BESIDE_CONNECTIONS = 512


class Application(Protocol):
    """daemon/app.py, as the gate uses it."""

    def build_routes(self, state: Any) -> Sequence[Any]: ...
    def healthy(self, state: Any) -> bool: ...
    async def startup(self, settings: Settings) -> Any: ...
    async def shutdown(self, state: Any) -> None: ...


def load_application() -> Application:
    """Imports the application: the heavy part, for a thread."""
    return importlib.import_module("daemon.app")  # type: ignore[return-value]


class Gate:
    """ASGI application that answers for the daemon itself and passes the rest on, once there is something to pass it to."""

    def __init__(self, settings: Settings, load: Callable[[], Application]) -> None:
        self.settings = settings
        self.draining = False
        self.failed = asyncio.Event()
        self._load = load
        self._application: Application | None = None
        self._state: Any = None
        self._app: App | None = None
        self._settled = asyncio.Event()  # started, failed, or draining before either

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in {"/health", "/healthz"}:
            await self._answer(scope, send, 200, "draining" if self.draining else "ok")
        elif path == "/readyz":
            word = self._readiness()
            await self._answer(scope, send, 200 if word == "ready" else 503, word)
        else:
            await self._pass(scope, receive, send)

    def _readiness(self) -> str:
        if self.draining:
            return "draining"
        if self._application is None or self._app is None:
            return "starting"
        return "ready" if self._application.healthy(self._state) else "recovering"

    async def start(self) -> None:
        """Imports and starts the application. Sets `failed` when it cannot: the daemon is no use then."""
        try:
            self._application = await asyncio.to_thread(self._load)
            self._state = await self._application.startup(self.settings)
            self._app = await asyncio.to_thread(_route, self._application.build_routes(self._state))
        except Exception:
            log.exception("the daemon cannot start")
            self.failed.set()
        self._settled.set()

    async def stop(self) -> None:
        if self._application is not None and self._state is not None:
            await self._application.shutdown(self._state)

    def drain(self) -> None:
        self.draining = True
        self._settled.set()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and not self.draining:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), self.settings.startup_timeout_s)
        if self.draining:
            refusal = Refusal(503, "shutting_down", "the daemon is shutting down", headers=((b"connection", b"close"),))
            await send_refusal(send, refusal, scope["path"])
        elif self._app is None:
            headers = ((b"retry-after", b"1"),)
            await send_refusal(send, Refusal(503, "starting", "the daemon is starting", headers=headers), scope["path"])
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send, status: int, word: str) -> None:
        if scope["method"] not in {"GET", "HEAD"}:
            await send_refusal(send, _refusal_of(405), scope["path"], ((b"allow", b"GET, HEAD"),))
            return
        body = b'{"status":"%s"}' % word.encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class DaemonServer(uvicorn.Server):
    """Serves listening sockets with our protocol until it is told to stop. Signals are the business of __main__."""

    def __init__(self, settings: Settings, gate: Gate) -> None:
        limit = raise_file_limit(settings.max_connections + FILES_BESIDE_CONNECTIONS)
        app = SecurityMiddleware(gate, settings)
        quiet = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, http="httptools", ws="none", lifespan="off", proxy_headers=False, **quiet))
        self.settings, self.gate = settings, gate
        self.all = Connections(settings, limit)
        self.servers: list[Any] = []
        self._starting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Begin to end, from a signal handler. Nobody new gets in from now on: the loop looks at should_exit only every 100 ms."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_listening)

    def _stop_listening(self) -> None:
        for server in self.servers:
            server.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = loop = asyncio.get_running_loop()

        def connect() -> Connection:
            return Connection(self.config, self.server_state, self.all, loop)

        await self.on_tick(0)
        for listener in sockets or []:
            listen = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            self.servers.append(await listen(connect, sock=listener, backlog=1024))
        self._starting = loop.create_task(self.gate.start())
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        self.all.sweep(asyncio.get_running_loop().time())
        if self.gate.failed.is_set():
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Drains: no new connection, streams finish, and what has not finished in time is ended by the application."""
        self._stop_listening()
        self.gate.drain()
        if not await self._wait(lambda: not self.all.busy(), self.settings.drain_timeout_s):
            log.warning("%d requests did not finish in time", len(self.all.busy()))
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        await self._stop_gate()
        await self._wait(lambda: not self.all.busy(), END_TIMEOUT_S)
        for connection in list(self.all.open):
            connection.transport.close()
        await self._wait(lambda: not self.all.open, 1.0)
        for connection in list(self.all.open):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _stop_gate(self) -> None:
        try:
            await asyncio.wait_for(self.gate.stop(), END_TIMEOUT_S)
        except Exception:
            log.exception("the application did not stop cleanly")

    async def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `done`, keeping the connections' deadlines going."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while not done() and loop.time() < until:
            self.all.sweep(loop.time())
            await asyncio.sleep(0.02)
        return done()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _route(routes: Sequence[Any]) -> App:
    """The routes as an application whose own errors are JSON in the dialect of the path."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    async def answer(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, HTTPException) else HTTPException(500)
        status, headers = known.status_code, dict(known.headers or {})
        return Response(body_of(_refusal_of(status), request.url.path), status, headers, "application/json")

    app = Starlette(routes=list(routes), exception_handlers={HTTPException: answer, Exception: answer})
    app.router.redirect_slashes = False
    return app


def _refusal_of(status: int) -> Refusal:
    match status:
        case 404:
            return Refusal(404, "invalid_request", "there is no such route")
        case 405:
            return Refusal(405, "invalid_request", "that route does not take this method")
        case 500:
            return Refusal(500, "internal_error", "internal error", hint="the daemon's log has the cause")
        case _:
            return Refusal(status, "invalid_request", "the request cannot be served")


async def serve(
    settings: Settings, listeners: list[socket.socket], attach: Callable[[DaemonServer], None], load: Callable[[], Application]
) -> bool:
    """Runs a server on `listeners` until somebody to whom `attach` gave it stops it. False: the application did not start."""
    gate = Gate(settings, load)
    server = DaemonServer(settings, gate)
    attach(server)
    await server.serve(listeners)
    return not gate.failed.is_set()
