"""What happens to a request when its client, its worker or the daemon goes: B20, S26, S27; and how requests wait."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.scripted import MODEL, Scripted, ndjson, post, read_events, scripted_daemon, spelled, sse, wait_calm
from tests.daemon.wire import Client, until

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
EVERY_MS = 40


def hang_up(client: Client, how: str) -> None:
    if how == "reset":
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def aborted_after(daemon: Scripted, moment: float) -> tuple[float, int]:
    """Seconds until the worker was told, and how many steps it made meanwhile."""
    until(lambda: daemon.events("abort") or None)
    told = daemon.events("abort")[0]["at"]
    steps = [event for event in daemon.events("step") if moment < event["at"] < told and event["tokens"]]
    return told - moment, len(steps)


# --- B20, S27 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_b20_in_mid_stream(daemon: Scripted, kind: str, how: str, path: str) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS)
    client = daemon.client(kind)
    client.send(post(path, CHAT | {"stream": True}))
    read_events(client.sock, 4, b"}\n")
    hang_up(client, how)
    seconds, steps = aborted_after(daemon, time.monotonic())
    assert seconds < 0.25 and steps <= 2
    wait_calm(daemon)


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("stream", [True, False])
def test_b20_in_prefill(daemon: Scripted, kind: str, stream: bool) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS, prefill_steps=1000)
    client = daemon.client(kind)
    client.send(post("/v1/chat/completions", CHAT | {"stream": stream}))
    until(lambda: daemon.events("add") or None)
    hang_up(client, "close")
    assert aborted_after(daemon, time.monotonic())[0] < 0.25
    wait_calm(daemon)


@pytest.mark.timing
def test_b20_not_streamed(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS)
    client = daemon.client()
    client.send(post("/v1/chat/completions", CHAT))
    until(lambda: len(daemon.events("step")) > 3 or None)
    hang_up(client, "close")
    seconds, steps = aborted_after(daemon, time.monotonic())
    assert seconds < 0.25 and steps <= 2


@pytest.mark.timing
def test_b20_in_the_queue(daemon: Scripted) -> None:
    """One runs, one waits behind it; the one that waits leaves and is never scheduled."""
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS, max_running=1)
    running, waiting = daemon.client(), daemon.client()
    running.send(post("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 30}))
    read_events(running.sock, 2)
    waiting.send(post("/v1/chat/completions", CHAT | {"stream": True}))
    until(lambda: len(daemon.events("add")) == 2 or None)
    second = daemon.events("add")[1]["request"]["id"]
    hang_up(waiting, "close")
    assert aborted_after(daemon, time.monotonic())[0] < 0.25
    running.file.read(1)
    running.close()
    assert daemon.events("abort")[0]["request"] == second
    assert all(str(second) not in event["tokens"] for event in daemon.events("step"))


def test_b20_while_the_model_loads(daemon: Scripted) -> None:
    daemon.script(spelled("x"), load_ms=1000)
    client = daemon.client()
    client.send(post("/v1/chat/completions", CHAT))
    until(lambda: daemon.events("load") or None)
    hang_up(client, "close")
    wait_calm(daemon)
    assert daemon.chat().status == 200 and len(daemon.events("load")) == 1
    assert len(daemon.events("add")) == 1


# --- cancelling ---------------------------------------------------------------------------------------------------------------


def test_cancelled_by_id(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS)
    for path, parse in (("/v1/chat/completions", sse), ("/api/chat", ndjson)):
        with daemon.client() as client:
            client.send(post(path, CHAT | {"stream": True}))
            status, headers = client.head()
            client.chunk()
            cancelled = daemon.post(f"/v1/requests/{headers['x-request-id']}", {}, method="DELETE")
            assert status == 200 and cancelled.json["cancelled"] is True
            events = parse(b"".join(iter(client.chunk, b"")))
            errors = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
            assert len(errors) == 1 and "cancelled" in str(errors[0])
            assert (events[-1] == "[DONE]") == (path == "/v1/chat/completions")
    assert daemon.post("/v1/requests/req-nobody", {}, method="DELETE").status == 404


def test_cancelled_before_the_first_byte(daemon: Scripted) -> None:
    """A status, then: nothing was sent yet. Only a response header names a request, so a test has to look it up in the log."""
    daemon.script(spelled("x"), prefill_steps=1000, every_ms=EVERY_MS)
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT | {"user": "me"}))
        until(lambda: daemon.events("add") or None)
        request_id = next(word for word in daemon.log.split()[::-1] if word.startswith("req-")).rstrip(":")
        daemon.post(f"/v1/requests/{request_id}", {}, method="DELETE")
        reply = client.reply()
    assert (reply.status, reply.code) == (499, "cancelled") and reply.headers["x-request-id"] == request_id


# --- deaths -------------------------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_killed_worker_in_mid_stream(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS)
    with daemon.client() as openai, daemon.client() as ollama:
        openai.send(post("/v1/chat/completions", CHAT | {"stream": True}))
        ollama.send(post("/api/chat", CHAT))
        for client in (openai, ollama):
            client.head()
            client.chunk()
        os.kill(daemon.get("/api/ps").json["models"][0]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        events = sse(b"".join(iter(openai.chunk, b"")))
        assert time.monotonic() - killed < 1
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "worker_died" and events[-2]["error"]["hint"]
        assert all(choice["finish_reason"] is None for event in events[:-2] for choice in event["choices"])
        last = ndjson(b"".join(iter(ollama.chunk, b"")))[-1]
        assert last["code"] == "worker_died" and "done" not in last
    daemon.script(spelled("o", "k"))
    assert daemon.chat().json["choices"][0]["message"]["content"] == "ok"


def test_killed_worker_before_the_first_byte(daemon: Scripted) -> None:
    daemon.script(spelled("x"), prefill_steps=1000, every_ms=EVERY_MS)
    with daemon.client() as client:
        client.send(post("/v1/chat/completions", CHAT | {"stream": True}))
        until(lambda: daemon.events("step") or None)
        os.kill(daemon.get("/api/ps").json["models"][0]["pid"], signal.SIGKILL)
        reply = client.reply()
    assert (reply.status, reply.code) == (503, "worker_died")
    daemon.script(spelled("x"))
    assert daemon.chat().status == 200


def test_s26_one_bad_request_fails_alone(daemon: Scripted) -> None:
    daemon.script(spelled(*"abcdefgh"), every_ms=10, fail_request=3, fail_step=3)
    replies: dict[int, Any] = {}

    def ask(number: int) -> None:
        replies[number] = daemon.chat(seed=number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    daemon.chat(max_tokens=1)  # arrival 0
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = [reply for reply in replies.values() if reply.status != 200]
    assert [(reply.status, reply.code) for reply in bad] == [(500, "engine_error")]
    texts = [reply.json["choices"][0]["message"]["content"] for reply in replies.values() if reply.status == 200]
    assert texts == ["abcdefgh"] * 7
    assert daemon.chat().status == 200


def test_a_failed_step_ends_all_and_the_next_request_works(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=10, raise_at=3)
    events = sse(daemon.chat(stream=True).body)
    assert events[-2]["error"]["code"] == "engine_error" and events[-1] == "[DONE]"
    daemon.script(spelled("x"))
    assert daemon.chat().status == 200


def test_load_failure(daemon: Scripted) -> None:
    daemon.script(load_error={"code": "unsupported_model", "message": "no such thing", "hint": "another"})
    reply = daemon.chat(stream=True)
    assert (reply.status, reply.code) == (400, "unsupported_model") and reply.json["error"]["hint"] == "another"
    daemon.script(spelled("x"))
    assert daemon.chat().status == 200


# --- waiting ------------------------------------------------------------------------------------------------------------------


def test_pings_while_nothing_happens(daemon: Scripted) -> None:
    """The session's daemon pings after 0.4 s. A stream that pings is a 200; one that is not streamed never pings."""
    daemon.script(spelled("x"), load_ms=1500)
    whole: list[Any] = []
    other = threading.Thread(target=lambda: whole.append(daemon.chat()))
    other.start()
    reply = daemon.chat(stream=True)
    other.join()
    assert reply.status == 200 and 2 <= reply.body.count(b": ping\n\n") <= 4
    assert reply.body.startswith(b": ping\n\n") and sse(reply.body)[-1] == "[DONE]"
    assert whole[0].json["choices"][0]["message"]["content"] == "x"


def test_an_error_after_a_ping_is_an_event(daemon: Scripted) -> None:
    daemon.script(spelled("x"), load_ms=1000, load_error={"code": "unsupported_model", "message": "no"})
    reply = daemon.chat(stream=True)
    assert reply.status == 200 and sse(reply.body)[0]["error"]["code"] == "unsupported_model" and sse(reply.body)[-1] == "[DONE]"


def test_queue_full_is_said_at_once_and_those_accepted_finish(daemon: Scripted) -> None:
    """The session's daemon lets 8 wait."""
    daemon.script(spelled("x", "y"), every_ms=20, max_running=1, prefill_steps=5)
    daemon.chat()
    clients = [daemon.client() for _ in range(24)]
    for number, client in enumerate(clients):
        client.send(post("/api/chat" if number % 2 else "/v1/chat/completions", CHAT | {"stream": False}))
    replies = [client.reply() for client in clients]
    for client in clients:
        client.close()
    refused = [(number % 2, reply) for number, reply in enumerate(replies) if reply.status != 200]
    assert {(odd, reply.status, reply.code) for odd, reply in refused} == {(0, 429, "queue_full"), (1, 503, "queue_full")}
    assert all(1 <= int(reply.headers["retry-after"]) <= 60 for _, reply in refused)
    assert 8 <= 24 - len(refused) <= 12
    assert daemon.chat().status == 200


def test_shutdown_lets_streams_finish(tiny_model: Path) -> None:
    """SIGTERM in mid-answer: the whole text comes, a new request on an open connection is refused, and no process is left."""
    text = "abcdefghij" * 3
    with scripted_daemon(tiny_model) as daemon:
        daemon.script(spelled(*text), every_ms=EVERY_MS)
        with daemon.client() as openai, daemon.client("tcp") as ollama, daemon.client() as idle:
            assert idle.get("/api/version").status == 200
            openai.send(post("/v1/chat/completions", CHAT | {"stream": True}))
            ollama.send(post("/api/chat", CHAT))
            for client in (openai, ollama):
                client.head()
                client.chunk()
            pid = daemon.get("/api/ps").json["models"][0]["pid"]
            daemon.daemon.process.send_signal(signal.SIGTERM)
            until(lambda: idle.get("/health").json == {"status": "draining"} or None)
            idle.send(post("/v1/chat/completions", CHAT))
            assert idle.reply().code == "shutting_down"
            events = sse(b"".join(iter(openai.chunk, b"")))
            assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == text
            lines = ndjson(b"".join(iter(ollama.chunk, b"")))
            assert lines[-1]["done"] and lines[-1]["eval_count"] == len(text)
        assert daemon.daemon.process.wait(20) == 0
        until(lambda: not Path(f"/proc/{pid}").exists() or None)
        assert "Traceback" not in daemon.log


def test_shutdown_ends_streams_with_an_error_event(tiny_model: Path) -> None:
    with scripted_daemon(tiny_model, drain_timeout_s="0.3") as daemon:
        daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS)
        with daemon.client() as openai, daemon.client() as ollama:
            openai.send(post("/v1/chat/completions", CHAT | {"stream": True}))
            ollama.send(post("/api/chat", CHAT))
            for client in (openai, ollama):
                client.head()
                client.chunk()
            pid = daemon.get("/api/ps").json["models"][0]["pid"]
            daemon.daemon.process.send_signal(signal.SIGTERM)
            events = sse(b"".join(iter(openai.chunk, b"")))
            assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutting_down"
            assert ndjson(b"".join(iter(ollama.chunk, b"")))[-1]["code"] == "shutting_down"
        assert daemon.daemon.process.wait(20) == 0
        until(lambda: not Path(f"/proc/{pid}").exists() or None)
        assert "Traceback" not in daemon.log


def test_worker_output_is_in_the_log(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    daemon.chat()
    assert "scripted worker: loading" in daemon.log
    assert "hello" not in json.dumps(daemon.log), "prompts are not logged"
