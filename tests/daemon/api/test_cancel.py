"""S27, B20: whatever ends a request early reaches the engine within two steps, and one that waited is never part of any.

By DELETE, by a closed connection on either socket, and by a stop string; while it waits, in prefill and in decode.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.scripted import MODEL, Scripted, post, read_events, scripted_daemon, spelled, wait_calm
from tests.daemon.wire import Client, until

EVERY_MS = 40
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}

HOW = ["delete", "close", "reset"]
WHERE = ["queue", "prefill", "decode"]


def request_id(daemon: Scripted, client: Client, where: str) -> str:
    """As a client learns it from its first byte, or from a field that is named in the log when it has had none."""
    if where == "decode":
        return client.head()[1]["x-request-id"]
    return next(word for word in daemon.log.split()[::-1] if word.startswith("req-")).rstrip(":")


def end(daemon: Scripted, client: Client, how: str, where: str) -> float:
    """When the client went away, by the machine's clock."""
    if how == "delete":
        name = request_id(daemon, client, where)
        moment = time.monotonic()
        assert daemon.post(f"/v1/requests/{name}", {}, method="DELETE").json["cancelled"] is True
        return moment
    if how == "reset":
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    moment = time.monotonic()
    client.close()
    return moment


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", WHERE)
def test_s27_cancelled(daemon: Scripted, kind: str, how: str, where: str) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=EVERY_MS, max_running=1, prefill_steps=1000 if where == "prefill" else 0)
    with daemon.client() as first:
        if where == "queue":
            first.send(post("/v1/chat/completions", CHAT | {"max_tokens": 30}))
            read_events(first.sock, 2)
        client = daemon.client(kind)
        client.send(post("/v1/chat/completions", CHAT | {"user": "me"}))
        behind = 1 if where == "queue" else 0
        until(lambda: len(daemon.events("add")) > behind or None)
        if where != "queue":
            until(lambda: len(daemon.events("step")) > 3 or None)
        moment = end(daemon, client, how, where)
        abort = until(lambda: next(iter(daemon.events("abort")), None))
        between = [event for event in daemon.events("step") if moment < event["at"] < abort["at"]]
        assert len(between) <= 2 and abort["at"] - moment < 0.25
        mine = daemon.events("add")[-1]["request"]["id"]
        assert abort["request"] == mine
        if where == "queue":
            first.file.read(1)
            assert all(mine not in event["requests"] for event in daemon.events("scheduled")), "it was never part of a step"
    wait_calm(daemon)


@pytest.mark.timing
def test_s27_a_stop_string_ends_the_sequence_within_two_steps(daemon: Scripted) -> None:
    daemon.script(spelled("a", "b", "c", "d"), repeat=True, every_ms=EVERY_MS)
    body = daemon.chat(stop="cd", n=2, max_tokens=20).json
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    made = [event for event in daemon.events("step") if event["tokens"]]
    found = next(event["at"] for event in made if spelled("d")[0] in next(iter(event["tokens"].values())))
    for choice in (0, 1):
        abort = next(event for event in daemon.events("abort") if event["choice"] == choice)
        assert len([event for event in made if found < event["at"] < abort["at"]]) <= 2
    assert len(made) <= 8, "nothing runs on behind the answer"


def test_a_full_queue_says_so_at_once_while_128_wait(tiny_model: Path) -> None:
    """The default: 128 wait, one more is refused in both dialects, with a time to come back; those who leave make room."""
    with scripted_daemon(tiny_model) as daemon:
        daemon.script(spelled("x"), every_ms=5, max_running=1, prefill_steps=10**6)
        clients = [daemon.client(("unix", "tcp")[number % 2]) for number in range(128)]
        for client in clients:
            client.send(post("/v1/chat/completions", CHAT | {"stream": False}))
            until(lambda: daemon.events("scheduled") or None)  # the first one runs, all others wait
        until(lambda: len(daemon.events("add")) == 128 or None)
        for path, status in (("/v1/chat/completions", 429), ("/api/chat", 503)):
            asked = time.monotonic()
            reply = daemon.post(path, CHAT)
            assert (reply.status, reply.code) == (status, "queue_full") and time.monotonic() - asked < 0.5
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        for client in clients[1:]:
            client.close()
        until(lambda: len(daemon.events("abort")) >= 127 or None)
        clients[0].close()
        wait_calm(daemon)
        assert len(daemon.events("scheduled")) == 1, "none of those that left while they waited was ever begun"
        daemon.script(spelled("x"))
        assert daemon.chat().status == 200
