"""A daemon server in a thread, an application that shows what reached it, and a client that speaks raw bytes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop
from starlette.routing import Mount

from daemon.config import Settings, resolve
from daemon.lifecycle import Presence
from daemon.server import DaemonServer, Gate

PATIENCE_S = 20.0
REQUEST_ID = re.compile(r"req-[0-9a-f]{24}")


class Probe:
    """The application under the server: paths say what it does, `events` what happened to it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.events: list[str] = []
        self.stopped = asyncio.Event()
        self.well = True

    def build_routes(self, state: Any) -> list[Any]:
        return [Mount("/", app=self)]

    def healthy(self, state: Any) -> bool:
        return self.well

    async def startup(self, settings: Settings) -> Probe:
        return self

    async def shutdown(self, state: Any) -> None:
        self.events.append("shutdown")
        self.stopped.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope["path"].strip("/").split("/")[-1]
        query = dict(part.split("=") for part in scope["query_string"].decode().split("&") if "=" in part)
        await getattr(self, f"do_{name}", self.do_scope)(scope, receive, send, query)

    async def do_scope(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        peer = scope["extensions"]["cavectl.peer"]
        shown = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode(),
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
            "peer": [peer.kind, peer.uid, peer.address],
            "key": peer.key,
            "body": (await read_body(receive)).decode("latin-1"),
        }
        self.events.append(f"scope {scope['path']}")
        await answer(send, json.dumps(shown).encode())

    async def do_ignore(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        await answer(send, b"ignored")

    async def do_count(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        total = 0
        while True:
            message = await receive()
            total += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        self.events.append(f"count {total} {message['type']}")
        await answer(send, b"%d" % total)

    async def do_fail(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        raise RuntimeError("secret /home/someone 0xdeadbeef")

    async def do_hang(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        await read_body(receive)
        self.events.append("hang began")
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.append(f"hang ended {time.monotonic()}")

    async def do_wait(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        await asyncio.sleep(float(query.get("s", 0.3)))
        await answer(send, b"waited " + query.get("tag", "").encode())

    async def do_exhaust(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        """Holds every file that the process may open, for a while."""
        files = []
        try:
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            await asyncio.sleep(float(query["s"]))
        for file in files:
            os.close(file)
        await answer(send, b"%d" % len(files))

    async def do_big(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        await answer(send, b"x" * int(query["bytes"]))

    async def do_stream(self, scope: Any, receive: Any, send: Any, query: Any) -> None:
        """Chunks of `size` bytes every `ms`, until `n` are sent, the client goes, or the application is told to stop."""
        await read_body(receive)
        gone = asyncio.create_task(receive())
        stopped = asyncio.create_task(self.stopped.wait())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for index in range(int(query.get("n", 1_000_000))):
            if gone.done() or self.stopped.is_set():
                break
            event = b"data: %d %d " % (index, time.monotonic_ns())
            await send(
                {"type": "http.response.body", "body": event.ljust(int(query.get("size", 0)), b".") + b"\n\n", "more_body": True}
            )
            await asyncio.wait({gone, stopped}, timeout=float(query.get("ms", 5)) / 1000, return_when=asyncio.FIRST_COMPLETED)
        end = b'data: {"error": {"code": "shutting_down"}}\n\n' if self.stopped.is_set() else b"data: [DONE]\n\n"
        how = "gone" if gone.done() else "told" if self.stopped.is_set() else "done"
        self.events.append(f"{query.get('tag', '')} stream ended {time.monotonic()} {how}")
        await send({"type": "http.response.body", "body": end, "more_body": False})
        gone.cancel()
        stopped.cancel()


async def read_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def answer(send: Any, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        error = self.json["error"]
        return error["code"] if isinstance(error, dict) else self.json["code"]


class Client:
    """Raw bytes out, responses in."""

    def __init__(self, address: tuple[str, int] | str, timeout_s: float = PATIENCE_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self.sock.settimeout(timeout_s)
        try:
            self.sock.connect(address)
        except OSError:
            self.sock.close()
            raise
        self.file = self.sock.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def get(self, path: str, **headers: str) -> Reply:
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
        self.send("\r\n".join([*lines, "", ""]).encode())
        return self.reply()

    def head(self) -> tuple[int, dict[str, str]]:
        line = self.file.readline()
        if not line:
            raise EOFError
        headers = {}
        while (field_line := self.file.readline()) not in {b"\r\n", b""}:
            name, value = field_line.decode().split(":", 1)
            headers[name.lower()] = value.strip()
        status = int(line.split()[1])
        assert status == 100 or REQUEST_ID.fullmatch(headers["x-request-id"]), "every answer has one, whoever gives it"
        return status, headers

    def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" at its end."""
        size = int(self.file.readline() or b"-1", 16)
        if size < 0:
            raise EOFError
        data = self.file.read(size)
        self.file.readline()
        return data

    def reply(self, *, bodiless: bool = False) -> Reply:
        status, headers = self.head()
        if bodiless or status == 204:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join(iter(self.chunk, b"")))
        return Reply(status, headers, self.file.read(int(headers["content-length"])))

    def ended(self) -> bool:
        """Waits for the end of the connection; False if more bytes come."""
        try:
            return self.file.read(1) == b""
        except ConnectionError:
            return True


@dataclass
class Harness:
    settings: Settings
    probe: Probe
    server: DaemonServer
    presence: Presence
    loop: asyncio.AbstractEventLoop
    clients: list[Client] = field(default_factory=list)

    def client(self, kind: str = "tcp", timeout_s: float = PATIENCE_S) -> Client:
        address = str(self.settings.socket) if kind == "unix" else ("127.0.0.1", self.presence.port)
        self.clients.append(Client(address, timeout_s))
        return self.clients[-1]

    def once(self, data: bytes, kind: str = "tcp") -> Reply:
        """The first response to `data` on a connection of its own."""
        with self.client(kind) as client:
            client.send(data)
            return client.reply()

    def event(self, start: str) -> str:
        """Waits until an event begins with `start`."""
        return until(lambda: next((event for event in self.probe.events if event.startswith(start)), None))

    def calm(self) -> None:
        """Waits until no connection is left."""
        until(lambda: not self.server.all.open or None)


def until(found: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first result of `found` that is not None."""
    deadline = time.monotonic() + timeout_s
    while (result := found()) is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return result


def settings_in(folder: Path, **changes: Any) -> Settings:
    """Settings that keep everything in `folder`, on a port that the kernel chooses."""
    environ = {f"CAVECTL_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "CONFIG", "RUNTIME")}
    changes = {"port": 0, "drain_timeout_s": 0.2, **changes}
    return replace(resolve({}, environ), **changes)


@contextmanager
def serving(folder: Path, load: Callable[[], Any] | None = None, **changes: Any) -> Iterator[Harness]:
    """A server in a thread; changes are of the settings."""
    settings = settings_in(folder, **changes)
    up, box = threading.Event(), {}

    async def main() -> None:
        box["probe"] = Probe(settings)
        gate = Gate(settings, load or (lambda: box["probe"]))
        box["server"] = server = DaemonServer(settings, gate)
        asyncio.get_running_loop().call_later(0.02, up.set)
        box["loop"] = asyncio.get_running_loop()
        await server.serve([listener for listener in (box["presence"].unix, box["presence"].tcp) if listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    with Presence(settings, "test") as presence:
        box["presence"] = presence
        thread = threading.Thread(target=run)
        thread.start()
        assert up.wait(PATIENCE_S)
        harness = Harness(settings, box["probe"], box["server"], presence, box["loop"])
        try:
            yield harness
        finally:
            for client in harness.clients:
                client.close()
            box["server"].should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
