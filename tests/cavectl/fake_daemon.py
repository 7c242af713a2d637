"""A small HTTP server on a Unix socket (or TCP) that speaks the API shapes of the daemon, for tests of the command line alone.

What it answers is decided by the test: `replies` maps the last user message to pieces of text or to a failure. It keeps every
request and notices when a client leaves in mid-answer.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cavectl import __version__

MODEL = "smollm2:135m"


@dataclass
class Reply:
    """Pieces of text, `pause_s` apart; then `error` (a line in the stream) or a proper end. `status` refuses before any text."""

    pieces: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    error: dict[str, str] | None = None
    status: int = 200
    done_reason: str = "stop"
    prompt_tokens: int = 10
    cut: bool = False  # close the connection without the last line


@dataclass
class FakeDaemon:
    models: list[str] = field(default_factory=lambda: [MODEL])
    pullable: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # here, but not in memory
    replies: dict[str, Reply] = field(default_factory=dict)
    version: str | None = __version__
    pull_pause_s: float = 0.0
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # a client went away in mid-answer

    def bodies(self, path: str) -> list[Any]:
        return [body for _, p, body in self.requests if p == path]

    def listen(self, path: Path) -> Iterator[FakeDaemon]:
        yield from self._serve(_UnixServer(path, _handler(self)))

    def listen_tcp(self) -> Iterator[int]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        for _ in self._serve(server):
            yield server.server_address[1]

    def _serve(self, server: ThreadingHTTPServer) -> Iterator[FakeDaemon]:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def reply_to(self, text: str) -> Reply:
        return self.replies.get(text, Reply([f"echo: {text}"]))


class _UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def __init__(self, path: Path, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(str(path), handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        return


def _handler(fake: FakeDaemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return "local"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

        def do_GET(self) -> None:
            self._record(None)
            answers: dict[str, Any] = {
                "/health": {"status": "ok"},
                "/api/version": {"version": "0.12.0"} | ({"cavectl": fake.version} if fake.version else {}),
                "/api/tags": {"models": [self._tag(name) for name in fake.models]},
                "/api/ps": {"models": [self._tag(name) | _loaded() for name in fake.models[:1]]},
            }
            self._document(200, answers[self.path]) if self.path in answers else self._document(404, {"error": "no such route"})

        def do_DELETE(self) -> None:
            name = self._record(self._body())["model"]
            if name in fake.models:
                fake.models.remove(name)
                self._document(200, {})
            else:
                self._not_found(name)

        def do_POST(self) -> None:
            body = self._record(self._body())
            route = self.path.rpartition("/")[2]
            getattr(self, f"_{route}")(body)

        def _show(self, body: Any) -> None:
            if body["model"] not in fake.models:
                return self._not_found(body["model"])
            about = {"general.architecture": "llama", "llama.context_length": 8192}
            details = {"parameter_size": "135M", "quantization_level": "Q4_1", "format": "gguf"}
            return self._document(
                200, {"details": details, "model_info": about, "license": "Apache-2.0", "capabilities": ["completion"]}
            )

        def _pull(self, body: Any) -> None:
            name = body["model"]
            if name not in fake.pullable:
                return self._not_found(name)
            events: list[dict[str, Any]] = [{"status": "pulling manifest"}]
            events += [{"status": "pulling m.gguf", "total": 1000, "completed": n} for n in range(0, 1001, 50)]
            self._start_stream()
            for event in [*events, {"status": "verifying sha256 digest"}, {"status": "writing manifest"}]:
                if not self._line(event):
                    return None
                time.sleep(fake.pull_pause_s)
            fake.models.append(name)
            self._line({"status": "success"})
            return self._end_stream()

        def _import(self, body: Any) -> None:
            name = body.get("name") or Path(body["path"]).stem
            fake.models.append(name)
            self._start_stream()
            self._line({"status": "importing", "total": 10, "completed": 10})
            self._line({"status": "success", "model": name})
            self._end_stream()

        def _verify(self, body: Any) -> None:
            name = body["model"]
            if name not in fake.models:
                return self._not_found(name)
            self._start_stream()
            self._line({"status": "verifying m.gguf", "total": 10, "completed": 10})
            if name in fake.damaged:
                hint = f"cavectl pull {name} gets it again"
                self._line({"error": f"{name} is damaged: m.gguf", "code": "hash_mismatch", "hint": hint})
            else:
                self._line({"status": "success", "model": name})
            return self._end_stream()

        def _generate(self, body: Any) -> None:
            if "prompt" in body:
                self._answer(body, body["prompt"], lambda piece: {"response": piece})
            elif body["model"] in fake.models:
                moved = {"was_loaded": body["model"] not in fake.idle} if body.get("keep_alive") == 0 else {}
                self._document(200, {"model": body["model"], "done": True, **moved})
            else:
                self._not_found(body["model"])

        def _chat(self, body: Any) -> None:
            text = body["messages"][-1]["content"]
            self._answer(body, text, lambda piece: {"message": {"role": "assistant", "content": piece}})

        def _answer(self, body: Any, text: str, event: Any) -> None:
            reply = fake.reply_to(text)
            if body["model"] not in fake.models:
                return self._not_found(body["model"])
            if reply.status != 200:
                return self._document(reply.status, reply.error)
            self._start_stream()
            for piece in reply.pieces:
                if not self._line({"model": body["model"], "done": False} | event(piece)):
                    return None
                time.sleep(reply.pause_s)
            if reply.cut:
                self.close_connection = True
                return None
            self._line(
                reply.error
                or {"model": body["model"], "done": True, "done_reason": reply.done_reason}
                | event("")
                | _figures(reply.prompt_tokens)
                | {"context_length": body.get("ctx", 8192)}
            )
            return self._end_stream()

        def _tag(self, name: str) -> dict[str, Any]:
            digest = "sha256:" + "ab" * 32
            return {
                "name": name,
                "model": name,
                "size": 98_362_432,
                "digest": digest,
                "modified_at": "2026-01-02T03:04:05.123456789Z",
            }

        def _record(self, body: Any) -> Any:
            fake.requests.append((self.command, self.path, body))
            fake.headers.append(dict(self.headers))
            return body

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def _not_found(self, name: str) -> None:
            self._document(404, {"error": f"no model {name}", "code": "model_not_found", "hint": f"did you mean {MODEL}?"})

        def _document(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _start_stream(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def _line(self, event: dict[str, Any]) -> bool:
            data = json.dumps(event).encode() + b"\n"
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            except OSError:
                fake.left.set()
                return False
            return True

        def _end_stream(self) -> None:
            self.wfile.write(b"0\r\n\r\n")

    return Handler


def _loaded() -> dict[str, Any]:
    pages = {"total": 512, "used": 12, "cached": 20, "pinned": 10}
    state = {"context_length": 8192, "backend": "reference", "state": "ready", "requests": 0, "pages": pages}
    return state | {"expires_at": "2999-01-01T00:00:00Z"}


def _figures(prompt_tokens: int) -> dict[str, Any]:
    timings = {
        "cache_n": 3,
        "prompt_n": 7,
        "prompt_ms": 70.0,
        "predicted_n": 5,
        "predicted_ms": 50.0,
        "ttft_ms": 81.5,
        "queue_ms": 1.5,
    }
    counts = {"prompt_eval_count": prompt_tokens, "prompt_eval_duration": 70_000_000, "eval_count": 5, "eval_duration": 50_000_000}
    return {"total_duration": 2_125_000_000, "load_duration": 1_000_000, **counts, "timings": timings}
