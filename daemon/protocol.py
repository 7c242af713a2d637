"""One HTTP/1.1 connection: the one place for connection rules (S19, S20), on top of uvicorn's HttpToolsProtocol.

Adds what uvicorn lacks: the peer's identity, caps on request line, headers and body counted while they arrive, strict framing,
deadlines for head, body, idling and unread answers, true half-close on Unix sockets, and refusals that never mix with an answer
under way. The invariant: memory per connection is bounded by the caps whatever is sent, and bytes of one request never become part
of another. On TCP the end of the client's stream cannot be told from a close: it cancels. Uses uvicorn's internals; the names it
relies on are listed in tests/daemon/test_protocol_hooks.py.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.parse
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from daemon.connections import Connections
from daemon.exchange import WRITE_BYTES, Exchange
from daemon.platform import hung_up, peer_uid
from daemon.refusal import REQUEST_ID, Refusal, new_request_id, wire_of
from daemon.security import PEER, PeerInfo

FEED_BYTES = 16384
"""What the parser sees at once, so that an unfinished header can outgrow its cap by no more than this."""

LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20
"""How much a refused client may go on sending, and for how long, so that it can still read why."""

PIPELINED_REQUESTS = 8

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})


class Connection(HttpToolsProtocol):
    """A client's connection. Times are of the loop's monotonic clock."""

    parser: httptools.HttpRequestParser
    app: Any

    def __init__(self, config: Config, state: ServerState, connections: Connections, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, state, {}, loop)
        self.all = connections
        self.settings = connections.settings
        self.peer = PeerInfo("tcp")
        self.waiting_since = loop.time()
        self._fd = -1
        self._active: Exchange | None = None  # its response is being made
        self._receiving: Exchange | None = None  # its body is arriving
        self._head_since: float | None = loop.time()
        self._body_since = self._body_seen = 0.0
        self._stalled_since: float | None = None
        self._closing_since: float | None = None
        self._deaf = False  # whatever else arrives is dropped
        self._half_closed = False
        self._upgrading = False
        self._dropped_bytes = 0
        self._quiet_bytes = 0  # arrived since the parser last had something to tell
        self._header_bytes = self._header_count = self._body_bytes = 0
        self.url = b""

    # Transport

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        self._fd = sock.fileno()
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        try:
            self.peer = self._identify(sock)
            self.all.admit(self)
            self._check_user()
        except Refusal as refusal:
            self.refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.forget(self)
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - asyncio's type, not uvicorn's
        """True keeps the connection for the answer: a Unix socket whose client only stopped sending."""
        waits = self._active is not None and self._receiving is None and not self._deaf
        if waits and self.peer.kind == "unix" and not hung_up(self._fd):
            self._half_closed = True
            return True
        self._disconnect()
        return False

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._drop(len(data))
            return
        if self._head_since is None and self._receiving is None:
            self._head_since = self.loop.time()
        view = memoryview(data)
        for start in range(0, len(view), FEED_BYTES):
            self._feed(view[start : start + FEED_BYTES])
            if self._deaf:
                return

    def pause_writing(self) -> None:
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()

    # Parser

    def _feed(self, piece: memoryview | bytes) -> None:
        self._quiet_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(piece[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refuse(cause if isinstance(cause, Refusal) else Refusal(400, "invalid_request", "this is not valid HTTP/1.1"))
        else:
            if self._quiet_bytes > self.settings.max_header_bytes:
                self.refuse(_too_large("headers"))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serves a request that asks for another protocol as if it had not: the parser stopped after its head."""
        self._upgrading = False
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        lines = [b"%s %s HTTP/1.1" % (self.scope["method"].encode(), self.url), *(b"%s: %s" % header for header in kept)]
        self._feed(b"\r\n".join([*lines, b"", b""]))
        if not self._deaf:
            self._feed(rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since = self._head_since or self.loop.time()
        self._quiet_bytes = self._header_bytes = self._header_count = 0

    def on_url(self, url: bytes) -> None:
        self._quiet_bytes = 0
        super().on_url(url)
        if len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1") > self.settings.max_request_line_bytes:
            raise Refusal(414, "too_large", f"the request line is longer than {self.settings.max_request_line_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._quiet_bytes = 0
        self._header_bytes += len(name) + len(value) + len(": \r\n")
        self._header_count += 1
        if self._header_count > self.settings.max_headers or self._header_bytes > self.settings.max_header_bytes:
            raise _too_large("headers")
        if self._receiving is None:  # else it is a trailer, which no route reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._quiet_bytes = 0
        self._head_since = None
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.scope["method"] = method.decode("ascii")
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._upgrading = True
            return
        self._check_head(method, version)
        self._read_target()
        self.scope["http_version"] = version
        ours = {PEER: self.peer, REQUEST_ID: new_request_id()}
        self.scope["extensions"] = ours  # ours, not those of ASGI
        self._queue(self._new_exchange(version))

    def on_body(self, body: bytes) -> None:
        if self._receiving is None:
            return
        self._quiet_bytes = 0
        self._body_seen = self.loop.time()
        self._body_bytes += len(body)
        if self._body_bytes > self.settings.max_body_bytes:
            raise _too_large("body")
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._quiet_bytes = 0

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        super().on_message_complete()
        self._receiving = None
        self._quiet_bytes = 0

    def _check_head(self, method: bytes, version: str) -> None:
        if version not in {"1.0", "1.1"}:
            raise Refusal(505, "unsupported", "only HTTP/1.0 and HTTP/1.1 are spoken here")
        if method not in METHODS:
            raise Refusal(501, "unsupported", "that method is not served here")
        for name, value in self.headers:
            match name, value.strip().lower():
                case b"transfer-encoding", coding if version != "1.1" or coding != b"chunked":
                    raise Refusal(400, "invalid_request", "the only transfer encoding is chunked, in HTTP/1.1")
                case b"content-encoding", coding if coding not in {b"", b"identity"}:
                    raise Refusal(415, "unsupported", "a request body cannot be compressed")
                case b"expect", expectation if expectation != b"100-continue":
                    raise Refusal(417, "unsupported", "the only expectation is 100-continue")
                case b"content-length", length if int(length) > self.settings.max_body_bytes:
                    raise _too_large("body")

    def _read_target(self) -> None:
        """Path and query of the request line. The host of an absolute-form target replaces the Host header (RFC 9112, 3.2.2)."""
        if not self.url.startswith((b"/", b"http://", b"https://")):
            raise Refusal(400, "invalid_request", "the request target must be a path")
        parsed = httptools.parse_url(self.url)
        if not self.url.startswith(b"/"):
            host = parsed.host or b""
            authority = host if parsed.port is None else b"%s:%d" % (host, parsed.port)
            self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", authority)]
        raw_path = parsed.path or b"/"
        self.scope["path"] = urllib.parse.unquote(raw_path.decode("ascii"))
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = parsed.query or b""

    def _new_exchange(self, version: str) -> Exchange:
        return Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version == "1.1",
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    def _queue(self, exchange: Exchange) -> None:
        """Starts a request, or lets it wait for the response before it."""
        if len(self.pipeline) >= PIPELINED_REQUESTS:
            raise Refusal(400, "invalid_request", "too many requests at once on one connection")
        self.cycle = self._receiving = exchange
        self._body_since = self._body_seen = self.loop.time()
        self._body_bytes = 0
        if self._active is None:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert isinstance(cycle, Exchange)
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        now = self.loop.time()
        self.server_state.total_requests += 1
        self._active, self.waiting_since = None, now
        if self.transport.is_closing():
            return
        if self._half_closed and not self.pipeline:
            self.transport.close()
            return
        if self._head_since is not None:
            self._head_since = now  # not the client's fault: reading was paused
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    # Rules

    @property
    def busy(self) -> bool:
        return self._active is not None

    def refuse(self, refusal: Refusal) -> None:
        """Ends the connection with an answer, after the answers that are still due to earlier requests."""
        self._deaf = True
        self.all.discount(self)
        self.all.note(refusal, self.peer)
        broken, self._receiving = self._receiving, None
        if self.pipeline and self.pipeline[0][0] is broken:
            self.pipeline.popleft()
        if self._active is not None and self._active is not broken:
            last = self.pipeline[0][0] if self.pipeline else self._active
            last.keep_alive = False
            return
        started = broken is not None and broken.response_started
        if broken is not None:
            broken.disconnect()
        if started or self.all.crowded:
            self.transport.abort()
            return
        head_only = bool(self.scope) and self.scope.get("method") == "HEAD"
        request_id = broken.request_id if broken is not None else new_request_id()
        self.transport.write(wire_of(refusal, self.url.decode("latin-1"), request_id=request_id, head_only=head_only))
        self._linger()

    def evict(self) -> None:
        """Makes room for another connection; there is no request here."""
        if self._head_since is None:
            self.transport.close()
        else:
            self.refuse(Refusal(503, "too_many_connections", "too many connections, and this one sent no request"))

    def check(self, now: float) -> None:
        """Applies the deadline of what this connection is doing."""
        limits = self.settings
        if self._closing_since is not None or self.transport.is_closing():
            self._check_closing(now)
        elif self._stalled_since is not None and now - self._stalled_since > limits.write_stall_timeout_s:
            self.all.note(Refusal(408, "timeout", "the client does not read its answer"), self.peer)
            self.transport.abort()
        elif self.busy and self._half_closed:
            self._check_presence()
        elif self._receiving is not None:
            if self.flow.read_paused:
                self._body_seen = now  # it is the application that does not read
            elif now - self._body_seen > limits.body_idle_timeout_s or now - self._body_since > limits.body_timeout_s:
                self.refuse(Refusal(408, "timeout", "the request body did not arrive in time"))
        elif self._head_since is not None and not self._deaf:
            if now - self._head_since > limits.header_timeout_s:
                self.refuse(Refusal(408, "timeout", "the request head did not arrive in time"))
        elif not self.busy and now - self.waiting_since > limits.idle_timeout_s:
            self.transport.close()

    def forgive(self, pause_s: float) -> None:
        """Moves every deadline by a time in which this process did not run."""
        for name in ("waiting_since", "_head_since", "_body_since", "_body_seen", "_stalled_since", "_closing_since"):
            since = getattr(self, name)
            if since is not None:
                setattr(self, name, since + pause_s)

    def _check_closing(self, now: float) -> None:
        if self._closing_since is None:
            self._closing_since = now
        patience_s = self.settings.write_stall_timeout_s if self.transport.is_closing() else LINGER_S
        if now - self._closing_since > patience_s:
            self.transport.abort()

    def _check_presence(self) -> None:
        """Notices that a half-closed client went away: its end of the stream was read before."""
        if hung_up(self._fd):
            self._disconnect()
            self.transport.abort()

    def _identify(self, sock: socket.socket) -> PeerInfo:
        if sock.family == socket.AF_UNIX:
            return PeerInfo("unix", uid=peer_uid(sock))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return PeerInfo("tcp", address=self.client[0] if self.client else None)

    def _check_user(self) -> None:
        if self.peer.kind == "unix" and not self.all.is_user(self.peer.uid):
            raise Refusal(403, "forbidden", "this daemon belongs to another user")

    def _disconnect(self) -> None:
        for exchange in (self._active, *(waiting for waiting, _app in self.pipeline)):
            if isinstance(exchange, Exchange):
                exchange.disconnect()
        self.pipeline.clear()

    def _drop(self, size: int) -> None:
        self._dropped_bytes += size
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.abort()

    def _linger(self) -> None:
        """Says that nothing more will come, and drops what still arrives, so that a reset does not overtake the answer."""
        self._closing_since = self.loop.time()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _too_large(what: str) -> Refusal:
    return Refusal(413 if what == "body" else 431, "too_large", f"the request {what} {'is' if what == 'body' else 'are'} too large")
