"""The client against a real server on a Unix socket: promptness, errors in both wire forms, and broken connections."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from cavectl.client import Client
from engine.errors import CavectlError
from tests.cavectl.conftest import Home
from tests.cavectl.fake_daemon import MODEL, FakeDaemon, Reply


def chat(text: str, model: str = MODEL) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


@pytest.fixture
def client(home: Home, fake: FakeDaemon) -> Client:
    return Client(socket_path=str(home.socket))


def test_each_line_comes_before_the_next_exists(client: Client, fake: FakeDaemon) -> None:
    fake.replies["slow"] = Reply(list("abcdef"), pause_s=0.1)
    arrivals: list[float] = []
    with client.stream("/api/chat", chat("slow")) as events:
        for event in events:
            if not event["done"]:
                arrivals.append(time.monotonic())  # noqa: PERF401
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert len(arrivals) == 6
    assert min(gaps) > 0.05


def test_leaving_the_block_cancels(client: Client, fake: FakeDaemon) -> None:
    fake.replies["long"] = Reply(["x"] * 1000, pause_s=0.02)
    with client.stream("/api/chat", chat("long")) as events:
        next(events)
    assert fake.left.wait(5)


def test_lines_of_any_length_arrive_whole(client: Client, fake: FakeDaemon) -> None:
    pieces = ["é🙂" * 50_000, "", "\n\n", "x" * 300_000]
    fake.replies["big"] = Reply(pieces)
    with client.stream("/api/chat", chat("big")) as events:
        assert "".join(event["message"]["content"] for event in events) == "".join(pieces)


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        (Reply(status=413, error={"error": "too big", "code": "too_large", "hint": "h"}), "too_large", "too big"),
        (Reply(status=503, error={"error": "gone", "code": "from_the_future"}), "internal_error", "gone"),
        (Reply(["a"], error={"error": "died", "code": "worker_died"}), "worker_died", "died"),
        (Reply(["a"], cut=True), "daemon_unreachable", "closed the connection"),
        (Reply(status=401, error={"message": "no key"}), "unauthorized", "status 401"),
    ],
)
def test_failures_carry_their_code(client: Client, fake: FakeDaemon, reply: Reply, code: str, message: str) -> None:
    fake.replies["bad"] = reply
    with pytest.raises(CavectlError, match=message) as caught, client.stream("/api/chat", chat("bad")) as events:
        list(events)
    assert caught.value.code == code


def test_the_openai_form_of_an_error_is_read_too(client: Client, fake: FakeDaemon) -> None:
    fake.replies["bad"] = Reply(status=404, error={"error": {"message": "none", "code": "model_not_found", "hint": "look"}})  # type: ignore[dict-item]
    with pytest.raises(CavectlError) as caught, client.stream("/api/chat", chat("bad")):
        pass
    assert (caught.value.code, caught.value.message, caught.value.hint) == ("model_not_found", "none", "look")


@pytest.mark.parametrize("url", ["127.0.0.1:{port}", "http://127.0.0.1:{port}", "http://127.0.0.1:{port}/"])
def test_a_url_is_asked_over_tcp_with_the_key(url: str) -> None:
    fake = FakeDaemon()
    for port in fake.listen_tcp():
        answer = Client(url=url.format(port=port), api_key="secret").get("/api/tags")
        assert answer["models"][0]["name"] == MODEL
    assert fake.headers[0]["Authorization"] == "Bearer secret"


def test_the_unix_socket_gets_no_key(home: Home, fake: FakeDaemon) -> None:
    Client(socket_path=str(home.socket), api_key="secret").get("/health")
    assert "Authorization" not in fake.headers[0]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:notaport"])
def test_what_is_no_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(CavectlError) as caught:
        Client(url=url).get("/health")
    assert caught.value.code == "invalid_request"


def test_nobody_there(home: Home) -> None:
    with pytest.raises(CavectlError) as caught:
        Client(socket_path=str(home.socket)).get("/health")
    assert caught.value.code == "daemon_unreachable"
    assert caught.value.hint == "cavectl daemon start"
