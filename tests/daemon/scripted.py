"""A real daemon whose engine is the scripted worker, with a tiny model in its store. For tests of everything above the engine.

`Scripted.script(...)` sets what the next worker will do; `events()` is what that worker saw. Letters are spelled with TinyTok, so a
script can be written as text.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.daemon.process import ROOT, Daemon, running
from tests.daemon.wire import Client, Reply, until
from tests.fixtures.tiny_tok import SPECIALS, byte_letters, tokens

MODEL = "tiny/rand:latest"
FIRST_BYTE = len(SPECIALS)
INSIDES = re.compile(r"0x[0-9a-f]{6,}|site-packages|Traceback|hf_|\.py\b|File \"|object at|engine/|daemon/|/tmp/|/root/|/home/")
WORKER = ROOT / "tests" / "fixtures" / "scripted_worker.py"


def workers() -> list[psutil.Process]:
    """Scripted workers that this process started itself and that still run."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if str(WORKER) in child.cmdline():
                found.append(child)
    return found


def spelled(*pieces: str | bytes | int) -> list[int]:
    """Token ids: a string that is a token is that token, other text and bytes go byte by byte, an int is itself."""
    letters, vocabulary = byte_letters(), {token: number for number, token in enumerate(tokens())}
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        data = piece if isinstance(piece, bytes) else piece.encode()
        whole = vocabulary.get("".join(letters[byte] for byte in data)) if isinstance(piece, str) else None
        ids += [FIRST_BYTE + byte for byte in data] if whole is None else [whole]
    return ids


def shown(ids: Sequence[int]) -> str:
    """What token ids say, control tokens by their names in brackets of their own."""
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    data = [f"[{SPECIALS[i]}]".encode() if i < FIRST_BYTE else bytes(letters[x] for x in tokens()[i]) for i in ids]
    return b"".join(data).decode("utf-8", "backslashreplace")


def checked(reply: Reply) -> Reply:
    """Every error of the suite passes here (S29): JSON, one line, a code, and nothing of the daemon's insides."""
    if reply.status >= 400:
        assert reply.headers["content-type"] == "application/json" and reply.code
        assert not INSIDES.search(reply.body.decode()), reply.body
    return reply


def post(path: str, body: Any, method: str = "POST", **headers: str) -> bytes:
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + data


def sse(data: bytes) -> list[Any]:
    """The events of a finished stream; asserts its framing. The end is the string "[DONE]", pings are left out."""
    assert data.endswith(b"\n\n")
    events = [event for event in data.decode().split("\n\n")[:-1] if event != ": ping"]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    bodies = [event.removeprefix("data: ") for event in events]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]


def ndjson(data: bytes) -> list[Any]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


@dataclass
class Scripted:
    daemon: Daemon
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "daemon.log").read_text()

    def client(self, kind: str = "unix") -> Client:
        return self.daemon.client(kind)

    def script(self, *scripts: Sequence[int], **plan: Any) -> None:
        """The next request loads a worker that follows this plan."""
        self.unload()
        (self.folder / "worker.log").unlink(missing_ok=True)
        whole = {"scripts": [list(script) for script in scripts] or [[]], "log": str(self.folder / "worker.log"), **plan}
        (self.folder / "plan.json").write_text(json.dumps(whole))

    @property
    def loaded(self) -> list[dict[str, Any]]:
        """What `/api/ps` shows."""
        reply = self.get("/api/ps")
        assert reply.status == 200, (reply.status, reply.body, self.log[-4000:])
        return reply.json["models"]

    def unload(self) -> None:
        for model in self.loaded:
            self.post("/api/generate", {"model": model["name"], "keep_alive": 0})
        until(lambda: self.loaded == [] or None)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What the worker logged, in order."""
        path = self.folder / "worker.log"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == kind] if kind else lines

    def get(self, path: str, kind: str = "unix") -> Reply:
        with self.client(kind) as client:
            return checked(client.get(path))

    def post(self, path: str, body: Any, kind: str = "unix", method: str = "POST") -> Reply:
        with self.client(kind) as client:
            client.send(post(path, body, method))
            return checked(client.reply())

    def chat(self, content: str = "hello", **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def ollama(self, content: str = "hello", **fields: Any) -> Reply:
        return self.post("/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields})


@contextmanager
def scripted_daemon(model_folder: Path, **variables: str) -> Iterator[Scripted]:
    """A daemon in a folder of its own with the model imported as MODEL. `variables`: settings, as CAVECTL_<NAME>."""
    folder = Path(tempfile.mkdtemp(prefix="cavectl-"))  # short: it holds a Unix socket
    try:
        command = shlex.join([sys.executable, str(WORKER), str(folder / "plan.json")])
        env = {"PYTHONPATH": str(ROOT), "CAVECTL_WORKER_COMMAND": command}
        env |= {f"CAVECTL_{name.upper()}": value for name, value in variables.items()}
        with running(folder, "--log-file", str(folder / "daemon.log"), module="daemon", env=env) as daemon:
            scripted = Scripted(daemon, folder)
            imported = scripted.post("/api/import", {"path": str(model_folder), "name": MODEL})
            assert ndjson(imported.body)[-1]["status"] == "success", imported.body
            yield scripted
    finally:
        shutil.rmtree(folder)


def wait_calm(scripted: Scripted) -> None:
    """Until no request is in work."""
    until(lambda: all(model["requests"] == 0 for model in scripted.loaded) or None)


def read_events(sock: socket.socket, count: int, separator: bytes = b"\n\n") -> list[tuple[float, bytes]]:
    """Raw reads of a chunked stream: when each event's last byte was read, and the event."""
    seen: list[tuple[float, bytes]] = []
    data = b""
    while len(seen) < count:
        part = sock.recv(65536)
        now = time.monotonic()
        assert part, "the stream ended early"
        data += part
        while separator in data:
            event, _, data = data.partition(separator)
            seen.append((now, event))
    return seen
