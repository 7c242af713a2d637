"""Each token's event reaches the client before the next token exists, on both sockets, whatever else the daemon does."""

from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.daemon.scripted import MODEL, Scripted, post, read_events, scripted_daemon, spelled
from tests.fixtures.tiny_rand import tiny_rand
from tests.fixtures.tiny_tok import write_tiny_tok

EVERY_MS = 50
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """Its context is so large that a prompt of 4 MB has to be tokenised before it is known not to fit."""
    folder = tiny_rand(context_tokens=1 << 20).save(tmp_path_factory.mktemp("tiny"))
    write_tiny_tok(folder)
    with scripted_daemon(folder, context_tokens=str(1 << 20), header_timeout_s="3") as scripted:
        yield scripted


def stream(daemon: Scripted, kind: str, path: str, body: dict[str, Any], count: int, separator: bytes) -> list[tuple[float, bytes]]:
    with daemon.client(kind) as client:
        client.send(post(path, body))
        return read_events(client.sock, count, separator)


def made_at(daemon: Scripted) -> list[float]:
    """When the worker made each token."""
    return [event["at"] for event in daemon.events("step") if event["tokens"]]


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_each_event_arrives_before_the_next_token_exists(daemon: Scripted, kind: str, path: str) -> None:
    count = 40
    daemon.script(spelled(*"abcdefghij" * 4), every_ms=EVERY_MS)
    openai = path.startswith("/v1")
    role = 1 if openai else 0
    seen = stream(daemon, kind, path, CHAT, count + role, b"\n\n" if openai else b"}\n")[role:]
    made = made_at(daemon)[:count]
    assert len({at for at, _ in seen}) == count, "two events shared a read"
    delays = [(arrived - at) * 1e3 for (arrived, _), at in zip(seen, made, strict=True)]
    print(f"\n{kind} {path}: median {statistics.median(delays):.2f} ms, worst {max(delays):.2f} ms")
    assert all(arrived < following for (arrived, _), following in zip(seen, made[1:], strict=False))
    assert statistics.median(delays) < 5


@contextmanager
def eight_streams(daemon: Scripted, tokens: int) -> Iterator[None]:
    """The body runs while eight streams do, on both sockets; afterwards each has had all its tokens, none of them late."""
    daemon.script(spelled(*"abcdefghij"), repeat=True, every_ms=EVERY_MS)
    daemon.chat(max_tokens=1)
    seen: dict[int, list[tuple[float, bytes]]] = {}

    def follow(number: int) -> None:
        kind = "tcp" if number % 2 else "unix"
        seen[number] = stream(daemon, kind, "/v1/chat/completions", CHAT | {"max_tokens": tokens}, tokens, b"\n\n")

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    yield
    assert all(thread.is_alive() for thread in threads), "the streams ended before the body did"
    for thread in threads:
        thread.join()
    gaps = [(b - a) * 1e3 for events in seen.values() for (a, _), (b, _) in itertools.pairwise(events)]
    print(f"gaps: median {statistics.median(gaps):.1f} ms, worst {max(gaps):.1f} ms")
    assert len(gaps) == 8 * (tokens - 1)
    assert max(gaps) < EVERY_MS + 150


@pytest.mark.timing
def test_a_long_prompt_leaves_streams_alone(daemon: Scripted) -> None:
    """Prompts of 4 MB are rendered and tokenised while eight streams run."""
    text = 'In the beginning there was "text" and it was long.\n' * 80_000
    with eight_streams(daemon, 160):
        for path, body in (
            ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"model": MODEL, "prompt": text}),
        ):
            started = time.monotonic()
            reply = daemon.post(path, body)
            print(f"\n4 MB prompt answered {reply.status} after {time.monotonic() - started:.2f} s")
            assert reply.code == "context_length_exceeded"


@pytest.mark.timing
def test_hostile_connections_leave_streams_alone(daemon: Scripted) -> None:
    """20,000 headers, a header of 8 MB, headers that drip past their time, and half-closed sockets, while eight streams run."""
    start = b"GET /api/tags HTTP/1.1\r\nHost: localhost\r\n"
    whole = post("/v1/chat/completions", CHAT | {"max_tokens": 2, "stream": False})
    with eight_streams(daemon, 120):
        dripping = [daemon.client("tcp" if number % 2 else "unix") for number in range(8)]  # fewer than may linger
        for client in dripping:
            client.send(start + b"X: ")
        until_s = time.monotonic() + 3.5
        while time.monotonic() < until_s:
            for client in dripping:
                with suppress(OSError):  # cut off in between
                    client.send(b"y")
            for kind, hostile in itertools.product(("tcp", "unix"), (b"A: b\r\n" * 20_000, b"X: " + b"v" * (8 << 20) + b"\r\n")):
                with daemon.client(kind) as client:
                    client.send(start + hostile + b"\r\n")
                    assert client.reply().status == 431
            with daemon.client("unix") as client:
                client.send(whole)
                client.sock.shutdown(socket.SHUT_WR)
                assert client.reply().json["usage"]["completion_tokens"] == 2
            with daemon.client("tcp") as client:
                client.send(whole[:-5])
                client.sock.shutdown(socket.SHUT_WR)
                assert client.ended()
        for client in dripping:
            assert client.reply().status == 408
