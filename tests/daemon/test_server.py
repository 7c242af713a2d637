"""The gate: /health from the first moment, routes as soon as there are any, and an end in order."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.wire import Probe, serving, settings_in, until


class Slow:
    """An application whose import takes until `go` is set."""

    def __init__(self, folder: Path) -> None:
        self.go, self.folder = threading.Event(), folder

    def __call__(self) -> Any:
        assert self.go.wait(20)
        return Probe(settings_in(self.folder))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_requests_wait_for_the_application_while_health_answers(tmp_path: Path, kind: str) -> None:
    slow = Slow(tmp_path)
    with serving(tmp_path, load=slow) as harness:
        waiting = [harness.client(kind) for _ in range(5)]
        for client in waiting:
            client.send(b"POST /scope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody")
        with harness.client(kind) as client:
            for path in ("/health", "/healthz"):
                assert (client.get(path).status, client.get(path).json) == (200, {"status": "ok"})
            assert (client.get("/readyz").status, client.get("/readyz").json) == (503, {"status": "starting"})
        slow.go.set()
        for client in waiting:
            assert client.reply().json["body"] == "body"
        with harness.client(kind) as client:
            assert (client.get("/readyz").status, client.get("/readyz").json) == (200, {"status": "ready"})


def test_readyz_says_when_the_application_is_not_well(tmp_path: Path) -> None:
    with serving(tmp_path) as harness, harness.client() as client:
        assert client.get("/scope").status == 200
        for well, status, word in ((True, 200, "ready"), (False, 503, "recovering"), (True, 200, "ready")):
            harness.probe.well = well
            reply = client.get("/readyz")
            assert (reply.status, reply.json) == (status, {"status": word})
            assert client.get("/health").status == 200, "the daemon itself lives"


def test_waiting_is_bounded(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    with serving(tmp_path, load=slow, startup_timeout_s=0.1) as harness:
        with harness.client() as client:
            for path in ("/api/tags", "/v1/models"):
                reply = client.get(path)
                assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "starting", "1")
            assert client.get("/health").status == 200
        slow.go.set()


def test_a_stop_while_starting_answers_who_waits(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    with serving(tmp_path, load=slow) as harness:
        client = harness.client()
        client.send(b"GET /scope HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: harness.server.all.busy() or None)
        harness.server.should_exit = True
        reply = client.reply()
        assert (reply.status, reply.code) == (503, "shutting_down")
        assert client.ended()
        slow.go.set()


def test_an_application_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    def broken() -> Any:
        raise ImportError("no such thing")

    with serving(tmp_path, load=broken) as harness:
        until(lambda: harness.server.gate.failed.is_set() or None)
        until(lambda: harness.server.should_exit or None)


def test_shutdown_is_told_to_the_application_once(tmp_path: Path) -> None:
    with serving(tmp_path) as harness:
        with harness.client() as client:
            assert client.get("/scope").status == 200
        probe = harness.probe
    assert probe.events.count("shutdown") == 1


@pytest.mark.timing
def test_an_idle_server_stops_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, drain_timeout_s=30) as harness:
        idle = harness.client()
        assert idle.get("/scope").status == 200
        began = time.monotonic()
        harness.server.should_exit = True
        assert idle.ended()
        assert time.monotonic() - began < 1


def test_a_pause_of_the_process_is_not_blamed_on_clients(tmp_path: Path) -> None:
    with serving(tmp_path, idle_timeout_s=1.0, header_timeout_s=1.0) as harness:
        idle, partial = harness.client(), harness.client()
        assert idle.get("/scope").status == 200
        partial.send(b"GET /scope HTTP/1.1\r\n")
        until(lambda: len(harness.server.all.open) == 2 or None)
        harness.loop.call_soon_threadsafe(time.sleep, 2.5)
        time.sleep(2.6)
        assert idle.get("/scope").status == 200
        partial.send(b"Host: localhost\r\n\r\n")
        assert partial.reply().status == 200
