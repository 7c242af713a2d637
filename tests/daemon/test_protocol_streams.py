"""Streams, order and ends: each chunk leaves at once, a client that goes is noticed, and responses never mix."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.daemon.wire import Client, Harness, serving, until

HOST = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
RESET = b"\1\0\0\0\0\0\0\0"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with serving(tmp_path_factory.mktemp("d")) as harness:
        yield harness


@pytest.fixture(autouse=True)
def clean(harness: Harness) -> Iterator[None]:
    harness.probe.events.clear()
    yield
    for client in harness.clients:
        client.close()
    harness.clients.clear()
    harness.calm()


def opened(harness: Harness, kind: str, target: bytes) -> Client:
    client = harness.client(kind)
    client.send(b"GET " + target + HOST)
    return client


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_each_chunk_is_on_the_wire_before_the_next_exists(harness: Harness, kind: str) -> None:
    client = opened(harness, kind, b"/stream?n=20&ms=50")
    assert client.head()[0] == 200
    delays = []
    for index in range(20):
        words = client.chunk().split()
        delays.append((time.monotonic_ns() - int(words[2])) / 1e6)
        assert int(words[1]) == index
    assert max(delays) < 45, "a chunk waited for its successor"
    assert statistics.median(delays) < 5


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("target", [b"/hang", b"/stream?tag=s"])
def test_a_client_that_goes_is_noticed_at_once(harness: Harness, kind: str, how: str, target: bytes) -> None:
    client = opened(harness, kind, target)
    if target == b"/hang":
        harness.event("hang began")
    else:
        assert client.head()[0] == 200
    if how == "reset":
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    gone = time.monotonic()
    client.close()
    ended = float(harness.event("hang ended" if target == b"/hang" else "s stream ended").split()[-1 if target == b"/hang" else 3])
    assert ended - gone < 0.25


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_client_that_goes_with_requests_waiting_is_noticed(harness: Harness, kind: str) -> None:
    client = harness.client(kind)
    client.send(b"GET /hang" + HOST + b"GET /scope" + HOST)
    harness.event("hang began")
    until(lambda: next((True for each in harness.server.all.open if each.pipeline), None))
    gone = time.monotonic()
    client.close()
    assert float(harness.event("hang ended").split()[-1]) - gone < 0.25
    time.sleep(0.05)
    assert "scope /scope" not in harness.probe.events


def test_half_close_on_the_unix_socket_still_gets_its_answer(harness: Harness) -> None:
    client = opened(harness, "unix", b"/wait?s=0.5&tag=x")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.reply().body == b"waited x"
    assert client.ended()


def test_half_close_on_the_unix_socket_still_gets_its_stream(harness: Harness) -> None:
    client = opened(harness, "unix", b"/stream?n=20&ms=10&tag=s")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.head()[0] == 200
    assert len(list(iter(client.chunk, b""))) == 21
    assert "done" in harness.event("s stream ended")
    assert client.ended()


@pytest.mark.timing
def test_close_after_half_close_is_noticed(harness: Harness) -> None:
    client = opened(harness, "unix", b"/hang")
    client.sock.shutdown(socket.SHUT_WR)
    harness.event("hang began")
    time.sleep(0.2)
    assert not [event for event in harness.probe.events if event.startswith("hang ended")]
    gone = time.monotonic()
    client.close()
    assert float(harness.event("hang ended").split()[-1]) - gone < 0.25


@pytest.mark.timing
def test_half_close_on_tcp_cancels(harness: Harness) -> None:
    client = opened(harness, "tcp", b"/stream?ms=5&tag=s")
    assert client.head()[0] == 200
    client.chunk()
    gone = time.monotonic()
    client.sock.shutdown(socket.SHUT_WR)
    event = harness.event("s stream ended")
    assert "gone" in event and float(event.split()[3]) - gone < 0.25
    with pytest.raises(EOFError):
        while True:
            assert client.chunk().endswith(b"\n\n"), "a cut inside an event"


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_half_closed_before_the_body_ends_is_a_disconnect(harness: Harness, kind: str) -> None:
    client = harness.client(kind)
    client.send(b"POST /count HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.ended()
    assert harness.event("count") == "count 3 http.disconnect"


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_pipelined_requests_are_answered_in_order(harness: Harness, kind: str) -> None:
    client = harness.client(kind)
    tags = [b"a", b"b", b"c", b"d", b"e"]
    waits = [b"0.2", b"0", b"0.1", b"0", b"0.05"]
    client.send(b"".join(b"GET /wait?s=%s&tag=%s" % pair + HOST for pair in zip(waits, tags, strict=True)))
    assert [client.reply().body for _ in tags] == [b"waited " + tag for tag in tags]
    assert client.get("/scope").status == 200


def test_pipelined_bodies_reach_their_own_requests(harness: Harness) -> None:
    client = harness.client()
    posts = [
        b"POST /scope HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        for body in (b"one", b"three", b"")
    ]
    client.send(b"GET /wait?s=0.1" + HOST + b"".join(posts))
    assert client.reply().body.startswith(b"waited")
    assert [client.reply().json["body"] for _ in posts] == ["one", "three", ""]


def test_garbage_behind_a_request_does_not_touch_its_response(harness: Harness) -> None:
    client = harness.client()
    client.send(b"GET /stream?n=10&ms=10" + HOST + b"\x16\x03garbage\r\n\r\n")
    assert client.head()[0] == 200
    assert len(list(iter(client.chunk, b""))) == 11
    assert client.ended()


def test_requests_before_garbage_are_all_answered(harness: Harness) -> None:
    client = harness.client()
    client.send(
        b"GET /wait?s=0.1&tag=a" + HOST + b"GET /wait?s=0&tag=b" + HOST + b"POST /scope HTTP/1.1\r\nContent-Length: x\r\n\r\n"
    )
    assert [client.reply().body for _ in "ab"] == [b"waited a", b"waited b"]
    assert client.ended()


def test_too_deep_a_pipeline_is_cut(harness: Harness) -> None:
    client = harness.client()
    client.send((b"GET /wait?s=0.05" + HOST) * 1000)
    answered = 0
    while True:
        try:
            assert client.reply().status == 200
        except (EOFError, ConnectionError):
            break
        answered += 1
    assert 1 <= answered <= 9


def test_connection_works_after_refused_requests_with_bodies(harness: Harness) -> None:
    client = harness.client()
    body = b"x" * 300_000
    for _ in range(3):
        client.send(
            b"POST /scope HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert client.reply().status == 403
        client.send(b"POST /ignore HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        assert client.reply().body == b"ignored"
        client.send(b"2\r\nde\r\n0\r\n\r\n")
    assert client.get("/scope").json["path"] == "/scope"


def test_failure_in_mid_stream_is_no_clean_end(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(scope: object, receive: object, send: object, query: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise RuntimeError

    monkeypatch.setattr(harness.probe, "do_broken", broken, raising=False)
    client = opened(harness, "tcp", b"/broken")
    assert client.head()[0] == 200
    assert client.chunk() == b"part"
    with pytest.raises(EOFError):
        client.chunk()


def test_the_peer_is_named(harness: Harness) -> None:
    import os

    assert harness.client("unix").get("/scope").json["peer"] == ["unix", os.getuid(), None]
    assert harness.client("tcp").get("/scope").json["peer"] == ["tcp", None, "127.0.0.1"]


def test_nagle_is_off(harness: Harness) -> None:
    harness.client("tcp").get("/scope")
    (connection,) = harness.server.all.open
    assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
