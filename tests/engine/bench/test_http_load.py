"""The client of the HTTP rows, against a server that answers as scripted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from engine.bench import http_load
from engine.bench.http_load import Address

PAUSE_S = 0.05


class Server(ThreadingHTTPServer):
    daemon_threads = True
    status = 200
    short = 0  # tokens that an answer lacks
    bodies: list[dict[str, Any]]
    together = 0  # most requests at once
    inside = 0
    lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.inside += 1
            self.server.together = max(self.server.together, self.server.inside)
        self.send_response(self.server.status)
        self.end_headers()
        time.sleep(PAUSE_S)
        for _ in range(body["max_tokens"]):
            self.event({"choices": [{"text": "", "index": 0}]})
        time.sleep(PAUSE_S)
        self.event({"choices": [], "usage": {"completion_tokens": body["max_tokens"] - self.server.short}})
        self.wfile.write(b"data: [DONE]\n\n")
        with self.server.lock:
            self.server.inside -= 1

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\ndata: " + json.dumps(value).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as served:
        served.bodies = []
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def address(server: Server) -> Address:
    return Address(server.server_address[1], "m")


def test_an_answer_is_timed_and_counted(server: Server) -> None:
    answer = http_load.ask(address(server), [5, 6], 3)
    assert PAUSE_S <= answer.first_s <= answer.end_s - PAUSE_S / 2
    assert answer.tokens == 3
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (
        [5, 6],
        3,
        0,
        True,
        True,
    )


def test_clients_come_together(server: Server) -> None:
    crowd = http_load.crowd(address(server), [[n] for n in range(6)], 4)
    assert server.together == 6 and sorted(body["prompt"] for body in server.bodies) == [[n] for n in range(6)]
    assert 0 < crowd.tokens_per_s <= 24 / (2 * PAUSE_S) and crowd.first_p50_s >= PAUSE_S


def test_an_answer_that_is_too_short_counts_for_nothing(server: Server) -> None:
    server.short = 1
    with pytest.raises(RuntimeError, match="an answer had 3 tokens, 4 were asked for"):
        http_load.crowd(address(server), [[1], [2]], 4)


def test_errors_are_raised(server: Server) -> None:
    server.status = 503
    with pytest.raises(RuntimeError, match="answered 503"):
        http_load.ask(address(server), [1], 1)
    with pytest.raises(RuntimeError, match="answered 503"):
        http_load.crowd(address(server), [[1], [2]], 1)
    server.status = 200
    with pytest.raises(RuntimeError, match="had no token"):
        http_load.ask(address(server), [1], 0)


def test_nobody_there() -> None:
    with pytest.raises(OSError):
        http_load.ask(Address(1, "m"), [1], 1)
