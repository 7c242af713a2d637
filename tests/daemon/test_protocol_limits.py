"""S19 and S20: nothing that a client sends, or fails to send, costs more than its caps in memory or time."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.daemon.process import Daemon, running
from tests.daemon.wire import Client, Harness, Reply, serving, until

GET = b"GET /scope HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /count HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MIB = 2**20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d")) as daemon:
        with daemon.client() as client:
            client.get("/scope")
        yield daemon


def memory_bytes(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def flood(client: Client, start: bytes, unit: bytes, total: int) -> int:
    """Sends `start` and then `unit` until `total` bytes or until the server stops it. Returns what was sent."""
    client.send(start)
    sent = 0
    try:
        while sent < total:
            sent += client.sock.send(unit)
    except OSError:
        pass
    return sent


FLOODS = {
    "one header": (GET + b"X: ", b"v" * 65536, 431),
    "one header name": (GET, b"n" * 65536, 431),
    "many headers": (GET, b"A: b\r\n" * 10000, 431),
    "empty headers": (GET, b"A:\r\n" * 10000, 431),
    "request line": (b"GET /", b"a" * 65536, 414),
    "empty lines": (b"\r\n", b"\r\n" * 32768, 431),
    "chunk extension": (CHUNKED + b"1;", b"e" * 65536, 431),
    "trailer": (CHUNKED + b"0\r\nT: ", b"t" * 65536, 431),
    "trailers": (CHUNKED + b"0\r\n", b"T: t\r\n" * 10000, 431),
    "chunks": (CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", 413),
    "unread body": (CHUNKED.replace(b"count", b"ignore"), b"10000\r\n" + b"x" * 65536 + b"\r\n", 200),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_gibibyte_costs_no_memory_and_is_cut_off(daemon: Daemon, name: str) -> None:
    start, unit, status = FLOODS[name]
    pid = daemon.process.pid
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts again here
    before = memory_bytes(pid, "VmRSS")
    with daemon.client("tcp") as client:
        sent = flood(client, start, unit, 1024 * MIB)
        assert sent < 200 * MIB
        assert memory_bytes(pid, "VmHWM") - before < 8 * MIB
        with suppress(ConnectionError):  # still sending when the connection went: the answer may be lost with it
            assert client.reply().status == status
    with daemon.client("tcp") as client:
        assert client.get("/health").status == 200


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(
    "data", [GET + b"A: b\r\n" * 20000 + b"\r\n", GET + b"X: " + b"v" * 8 * MIB + b"\r\n\r\n"], ids=["count", "size"]
)
def test_the_refusal_reaches_a_client_that_sends_everything_first(daemon: Daemon, data: bytes, kind: str) -> None:
    with daemon.client(kind) as client:
        client.send(data)
        reply = client.reply()
        assert (reply.status, reply.code) == (431, "too_large")
        assert client.ended()


def ended_after(client: Client, drip: bytes = b"", every_s: float = 0.05) -> tuple[float, Reply | None]:
    """Sends `drip` byte by byte for ever; the seconds until the server closed, and what it said."""
    began = time.monotonic()
    stop = threading.Event()

    def send() -> None:
        for index in range(10**9):
            if stop.wait(every_s) or not drip:
                return
            try:
                client.send(drip[index % len(drip) : index % len(drip) + 1])
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        reply = client.reply()
    except (EOFError, ConnectionError):
        reply = None
    took = time.monotonic() - began
    stop.set()
    sender.join()
    return took, reply


SHORT = {
    "header_timeout_s": 0.6,
    "body_idle_timeout_s": 0.5,
    "body_timeout_s": 1.2,
    "idle_timeout_s": 0.5,
    "write_stall_timeout_s": 0.6,
}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with serving(tmp_path_factory.mktemp("d"), **SHORT) as harness:
        yield harness


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(
    ("start", "drip", "low_s", "status"),
    [
        (b"", b"", 0.6, 408),
        (b"GET /", b"a", 0.6, 408),
        (GET, b"X: y\r\n", 0.6, 408),
        (GET + b"X: ", b"y", 0.6, 408),
        (CHUNKED, b"", 0.5, 408),
        (CHUNKED, b"1\r\na\r\n", 1.2, 408),
        (b"POST /hang HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n", b"x", 1.2, 408),
    ],
    ids=["silent", "target", "headers", "header", "no body", "chunks", "body"],
)
def test_slow_sender_is_cut_off_in_time(hasty: Harness, start: bytes, drip: bytes, low_s: float, status: int, kind: str) -> None:
    with hasty.client(kind) as client:
        client.send(start)
        took, reply = ended_after(client, drip)
        assert reply is not None and (reply.status, reply.code) == (status, "timeout")
        assert low_s - 0.1 <= took < low_s + 1.0
        assert client.ended()


@pytest.mark.timing
def test_idle_connection_is_closed_without_a_word(hasty: Harness) -> None:
    with hasty.client() as client:
        assert client.get("/scope").status == 200
        took, reply = ended_after(client)
        assert reply is None and 0.4 <= took < 1.5


def test_waiting_for_a_response_is_not_idling(hasty: Harness) -> None:
    with hasty.client() as client:
        assert client.get("/wait?s=1.5").body.startswith(b"waited")


@pytest.mark.full
@pytest.mark.timing
def test_a_header_dripped_for_11_seconds_meets_the_default_deadline(tmp_path: Path) -> None:
    with serving(tmp_path) as harness, harness.client() as client:
        client.send(GET + b"X: ")
        took, reply = ended_after(client, b"y", every_s=0.5)
        assert reply is not None and reply.status == 408
        assert 9.9 <= took < 11


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_reader_that_stalls_is_cancelled_and_buffers_little(hasty: Harness, kind: str) -> None:
    hasty.probe.events.clear()
    with hasty.client(kind) as slow, hasty.client(kind) as fast:
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.send(b"GET /stream?size=60000&ms=1&tag=slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection = until(lambda: next((each for each in hasty.server.all.open if each.flow.write_paused), None))
        fast.send(b"GET /stream?ms=5&n=100 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert fast.head()[0] == 200
        stamps = []
        while chunk := fast.chunk():
            stamps.append(time.monotonic())
            assert connection.transport.get_write_buffer_size() <= 256 * 1024
            assert chunk.startswith(b"data: ")
        assert max(later - earlier for earlier, later in itertools.pairwise(stamps)) < 0.5
        began = time.monotonic()
        assert "gone" in hasty.event("slow stream ended")
        assert time.monotonic() - began < 2
    until(lambda: connection not in hasty.server.all.open or None)


def test_a_large_response_waits_for_its_reader(hasty: Harness) -> None:
    with hasty.client() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.send(b"GET /big?bytes=20000000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers = client.head()
        body = b""
        while len(body) < 20_000_000:
            for connection in [each for each in hasty.server.all.open if each.busy]:
                assert connection.transport.get_write_buffer_size() <= 256 * 1024
            body += client.file.read(100_000)
        assert status == 200 and headers["content-length"] == "20000000" and body == b"x" * 20_000_000
        assert client.get("/scope").status == 200


@pytest.mark.timing
def test_500_dripping_sockets_lock_nobody_out(tmp_path: Path) -> None:
    with serving(tmp_path, header_timeout_s=3.0) as harness:
        dripping = []
        for _ in range(500):
            sock = socket.create_connection(("127.0.0.1", harness.presence.port))
            sock.setblocking(False)
            dripping.append(sock)
        worst = 0.0
        for byte in b"GET / HTTP/1.1\r\nX":
            for sock in dripping:
                with suppress(OSError):
                    sock.send(bytes([byte]))
            for kind in ("tcp", "unix"):
                began = time.monotonic()
                with harness.client(kind) as client:
                    assert client.get("/scope").status == 200
                worst = max(worst, time.monotonic() - began)
            time.sleep(0.1)
        assert worst < 1.0
        harness.calm()
        for sock in dripping:
            sock.close()


def test_busy_connections_beyond_the_cap_get_503(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections_per_peer=4) as harness:
        busy = [harness.client() for _ in range(4)]
        for client in busy:
            client.send(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: len(harness.server.all.busy()) == 4 or None)
        with harness.client() as client:
            reply = client.reply()
            assert (reply.status, reply.code) == (503, "too_many_connections")
            assert reply.headers["retry-after"] == "1" and client.ended()
        with harness.client("unix") as client:
            assert client.get("/scope").status == 200, "another peer is not concerned"
        busy[0].close()
        until(lambda: len(harness.server.all.busy()) == 3 or None)
        with harness.client() as client:
            assert client.get("/scope").status == 200


def test_newcomer_takes_the_place_of_the_one_that_waited_longest(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=3) as harness:
        working, oldest, younger = (harness.client() for _ in range(3))
        working.send(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        harness.event("hang began")
        assert oldest.get("/scope").status == 200
        time.sleep(0.02)
        assert younger.get("/scope").status == 200
        with harness.client() as client:
            assert client.get("/scope").status == 200
        assert oldest.ended()
        assert younger.get("/scope").status == 200
        assert len(harness.server.all.busy()) == 1


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that may open 96 files."""
    command = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)); "
    command += "runpy.run_module('tests.daemon.scripted_daemon', run_name='__main__')"
    (tmp_path / "limited_daemon.py").write_text(command)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    with running(tmp_path, module="limited_daemon", env=env) as daemon:
        yield daemon


def test_more_connections_than_files_are_refused_and_a_stream_goes_on(limited: Daemon) -> None:
    with limited.client() as stream:
        stream.send(b"GET /stream?ms=10&n=100 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stream.head()[0] == 200
        crowd = [socket.create_connection(("127.0.0.1", limited.shown["port"])) for _ in range(200)]
        events = list(iter(stream.chunk, b""))
        assert len(events) == 101 and events[-1] == b"data: [DONE]\n\n"
        for sock in crowd:
            sock.close()
    for kind in ("tcp", "unix") * 10:
        with limited.client(kind) as client:
            assert client.get("/scope").status == 200
    assert limited.end() == 0


def test_accepting_survives_a_process_without_files(limited: Daemon) -> None:
    with limited.client() as stream, limited.client() as hog:
        stream.send(b"GET /stream?ms=10&n=150 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stream.head()[0] == 200
        hog.send(b"GET /exhaust?s=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        crowd = [socket.create_connection(("127.0.0.1", limited.shown["port"])) for _ in range(30)]
        assert int(hog.reply().body) > 10
        assert len(list(iter(stream.chunk, b""))) == 151
        for sock in crowd:
            sock.close()
    for kind in ("tcp", "unix") * 10:
        with limited.client(kind) as client:
            assert client.get("/scope").status == 200


def test_a_storm_of_connections_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path) as harness:
        address = ("127.0.0.1", harness.presence.port)
        files = len(os.listdir("/proc/self/fd"))
        threads = threading.active_count()
        for index in range(1000):
            sock = socket.create_connection(address)
            if index % 3 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if index % 4 == 0:
                sock.send(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n"[: index % 50])
            sock.close()
        harness.calm()
        until(lambda: len(os.listdir("/proc/self/fd")) <= files + 2 or None)
        assert threading.active_count() <= threads + 8  # asyncio's own pool at most
        assert harness.once(GET + b"\r\n").status == 200


@pytest.mark.timing
def test_a_thousand_connections_are_served(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections_per_peer=1024) as harness:
        crowd = [harness.client() for _ in range(1000)]
        waits = []
        for client in crowd:
            began = time.monotonic()
            assert client.get("/scope").status == 200
            waits.append(time.monotonic() - began)
        assert sorted(waits)[990] < 0.2
        for client in crowd:
            client.close()
        harness.calm()
