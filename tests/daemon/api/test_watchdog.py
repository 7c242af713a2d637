"""B48: a worker that is dead or hangs while requests run and wait, and what looks like a hang and is none.

Those whom a step had touched get 503; those who waited go on in the next worker, with their seed, in their order, and nothing is
said twice. /readyz dips until then.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon.scripted import MODEL, Scripted, ndjson, post, scripted_daemon, spelled, sse
from tests.daemon.wire import Client, until

WATCHDOG_S = 1.0
EVERY_MS = 20
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def daemon(tiny_model: Path) -> Iterator[Scripted]:
    """One for each test: a daemon remembers deaths, and lets later workers wait."""
    with scripted_daemon(tiny_model, watchdog_s=str(WATCHDOG_S)) as scripted:
        yield scripted


def ready(daemon: Scripted) -> int:
    with daemon.client() as client:
        return client.get("/readyz").status


def pid_of(daemon: Scripted) -> int:
    return until(lambda: next((m["pid"] for m in daemon.get("/api/ps").json["models"] if m["pid"]), None))


def metric(daemon: Scripted, name: str) -> float:
    lines = daemon.get("/metrics").body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])


def said(client: Client, path: str) -> tuple[str, Any]:
    """The text of a whole stream, and its last event before the end."""
    if path.startswith("/v1"):
        events = sse(b"".join(iter(client.chunk, b"")))
        assert events[-1] == "[DONE]"
        choices = [choice for event in events[:-1] for choice in event.get("choices", ())]
        return "".join(choice["delta"].get("content", "") for choice in choices), events[-2]
    lines = ndjson(b"".join(iter(client.chunk, b"")))
    return "".join(line["message"]["content"] for line in lines if "message" in line), lines[-1]


@contextmanager
def crowd(daemon: Scripted, waiting: int) -> Iterator[tuple[Client, list[tuple[Client, str]]]]:
    """One request that runs and streams, and others that wait behind it (`max_running` is 1), in both dialects, streamed."""
    with ExitStack() as stack:
        running = stack.enter_context(daemon.client())
        running.send(post("/v1/chat/completions", CHAT | {"stream": True, "seed": 1}))
        until(lambda: daemon.events("step") or None)
        others = []
        for number in range(waiting):
            path = ("/v1/chat/completions", "/api/chat")[number % 2]
            client = stack.enter_context(daemon.client(("unix", "tcp")[number // 2 % 2]))
            seed = 100 + number
            fields = {"seed": seed, "max_tokens": 12} if path.startswith("/v1") else {"options": {"seed": seed, "num_predict": 12}}
            client.send(post(path, CHAT | {"stream": True} | fields))
            until(lambda: len(daemon.events("add")) == 2 + len(others) or None)
            others.append((client, path))
        yield running, others


def seeds(daemon: Scripted) -> dict[int, list[int]]:
    """By process: the seeds of the requests that its worker was given, in order."""
    given: dict[int, list[int]] = {}
    for event in daemon.events("add"):
        given.setdefault(event["pid"], []).append(event["request"]["sampling"]["seed"])
    return given


@pytest.mark.timing
@pytest.mark.parametrize("fault", ["killed", "hung", "failed"])
def test_b48_who_ran_is_told_and_who_waited_goes_on(daemon: Scripted, fault: str) -> None:
    """Killed: kill -9. Hung: its loop sleeps. Failed: a step raised and no request can be blamed (RLIMIT, the allocator)."""
    once = daemon.folder / "once"
    plan = {"hung": {"hang_at": 5}, "failed": {"raise_at": 5}, "killed": {}}[fault]
    daemon.script(spelled(*"abcdefgh"), every_ms=EVERY_MS, max_running=1, repeat=True, once=str(once), crowd=7, **plan)
    with crowd(daemon, 6) as (running, others):
        pid = pid_of(daemon)
        assert ready(daemon) == 200
        if fault == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            until(lambda: once.exists() or None)
        began = time.monotonic()
        running.head()
        text, last = said(running, "/v1/chat/completions")
        seconds = time.monotonic() - began
        code = {"killed": "worker_died", "hung": "worker_timeout", "failed": "engine_error"}[fault]
        assert last["error"]["code"] == code and last["error"]["hint"] and set(text) <= set("abcdefgh")
        assert seconds < (WATCHDOG_S + 0.3 if fault == "hung" else 1)
        for client, path in others:
            status, _ = client.head()
            whole, end = said(client, path)
            assert status == 200 and "error" not in str(end)
            assert whole == "abcdefghabcd", "the whole text, and nothing of it twice"
    given = list(seeds(daemon).values())
    assert given == [[1, *range(100, 106)], list(range(100, 106))], "in their order, with their seeds, to the next worker only"
    waited = [event["request"].get("waited_ms", 0) for event in daemon.events("add") if event["pid"] != pid]
    assert all(0 < ms < 20_000 for ms in waited) and waited[0] > waited[-1], "they keep their age"
    assert ready(daemon) == 200 and pid_of(daemon) != pid
    assert metric(daemon, "cavectl:watchdog_kills_total") == (fault == "hung")
    assert metric(daemon, "cavectl:worker_restarts_total") == 1


def test_b48_stacks_are_in_the_log_and_readyz_dips_until_a_worker_is_back(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS, hang_at=3, once=str(daemon.folder / "once"), load_ms=300)
    seen: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            seen.append((time.monotonic(), ready(daemon)))

    watcher = threading.Thread(target=watch)
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT))
        hung = until(lambda: (daemon.events("hang") or [None])[0])["at"]
        watcher.start()
        reply = client.reply()
        assert (reply.status, reply.code) == (503, "worker_timeout") and "1 s" in reply.json["error"]["message"]
        answered = time.monotonic()
        until(lambda: ready(daemon) == 200 or None)
        stop.set()
        watcher.join()
    bad = [moment for moment, status in seen if status == 503]
    assert 0.5 * WATCHDOG_S < bad[0] - hung < answered - hung, "it is said before the waiters are told"
    assert bad[-1] - answered > 0.2, "and until the next one has loaded"
    assert all(status == 503 for moment, status in seen if bad[0] <= moment <= bad[-1])
    log = daemon.log
    assert "asking where it is" in log and "killing it" in log
    assert "most recent call first" in log and "in fail" in log, "the worker's own stack, with the function that hangs"


def test_a_request_outlives_three_deaths_and_no_more(daemon: Scripted) -> None:
    daemon.script(spelled("x"), deaf=True)
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT))
        for number in range(4):
            until(lambda number=number: len(daemon.events("add")) == number + 1 or None)
            os.kill(daemon.events("add")[-1]["pid"], signal.SIGKILL)
        reply = client.reply()
    assert (reply.status, reply.code) == (503, "worker_died")
    assert len({event["pid"] for event in daemon.events("add")}) == len(daemon.events("add")) == 4
    daemon.script(spelled("o", "k"))
    assert daemon.chat().json["choices"][0]["message"]["content"] == "ok"


def test_a_waiting_request_can_be_cancelled_between_two_workers(daemon: Scripted) -> None:
    daemon.script(spelled("x"), deaf=True, load_ms=600)
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT | {"stream": True}))
        until(lambda: daemon.events("add") or None)
        os.kill(daemon.events("add")[0]["pid"], signal.SIGKILL)
        until(lambda: len(daemon.events("load")) == 2 or None)
    until(lambda: all(m["requests"] == 0 and m["state"] == "ready" for m in daemon.get("/api/ps").json["models"]) or None)
    assert len(daemon.events("add")) == 1, "the next worker never heard of it"


# --- no false alarm -----------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("stopped", ["both", "daemon", "worker"])
def test_a_suspended_machine_is_not_a_hung_worker(daemon: Scripted, stopped: str) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS)
    pids = {"daemon": [daemon.daemon.process.pid], "worker": [], "both": [daemon.daemon.process.pid]}[stopped]
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 40}))
        client.head()
        client.chunk()
        worker = pid_of(daemon)
        pids += [worker] if stopped != "daemon" else []
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2.5 * WATCHDOG_S)
            if stopped == "worker":
                assert ready(daemon) == 200 and psutil.Process(worker).status() == psutil.STATUS_STOPPED
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        text, last = said(client, "/v1/chat/completions")
    assert last["choices"][0]["finish_reason"] == "length" and text == "x" * 40
    assert pid_of(daemon) == worker and ready(daemon) == 200


@pytest.mark.timing
def test_a_step_shorter_than_the_patience_is_not_a_hang(daemon: Scripted) -> None:
    """It is suspect for a moment at most, and never killed; the silence counts anew from each frame."""
    daemon.script(spelled(*"abc"), every_ms=EVERY_MS, hang_at=1, hang_ms=700 * WATCHDOG_S)
    assert daemon.chat().json["choices"][0]["message"]["content"] == "abc"
    assert len(daemon.events("load")) == 1 and ready(daemon) == 200


@pytest.mark.timing
def test_silence_without_a_debt_is_no_hang(daemon: Scripted) -> None:
    """Neither while nothing is asked nor while a client has not read its finished answer."""
    daemon.script(spelled("x"), every_ms=1)
    daemon.chat()
    worker = pid_of(daemon)
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT | {"stream": True}))
        time.sleep(2.5 * WATCHDOG_S)
        client.head()
        assert said(client, "/v1/chat/completions")[0] == "x"
    assert pid_of(daemon) == worker and ready(daemon) == 200 and len(daemon.events("load")) == 1
