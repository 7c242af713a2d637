"""What requests say to the prefix cache and what is told of it, with a scripted engine: salt, pin, retention, client, counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.daemon.scripted import MODEL, Scripted, ndjson, post, scripted_daemon, spelled, sse
from tests.daemon.wire import Reply, until

MESSAGES = [{"role": "user", "content": "hello"}]
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": "hello world"},
    "/api/chat": {"model": MODEL, "messages": MESSAGES},
    "/api/generate": {"model": MODEL, "prompt": "hello"},
}


def ends(daemon: Scripted, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The object that has the counts, not streamed and streamed."""
    options = {"stream_options": {"include_usage": True}} if path.startswith("/v1") else {}
    whole = daemon.post(path, BASE[path] | {"stream": False} | fields).json
    streamed = daemon.post(path, BASE[path] | {"stream": True} | options | fields).body
    return [whole, sse(streamed)[-2] if path.startswith("/v1") else ndjson(streamed)[-1]]


@pytest.mark.parametrize("path", BASE)
def test_cached_tokens_are_reported_on_every_route(daemon: Scripted, path: str) -> None:
    daemon.script(spelled("x", "y"), cached_tokens=3)
    for end in ends(daemon, path):
        usage, timings = end["usage"], end["timings"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3} and timings["cache_n"] == 3
        assert timings["prompt_n"] == usage["prompt_tokens"] - 3 > 0 and "queue_ms" in timings
        if path.startswith("/api"):
            assert end["prompt_eval_count"] == usage["prompt_tokens"], "the whole prompt"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_of_several_choices_the_firsts_cached_tokens_count(daemon: Scripted, path: str) -> None:
    """The others find what the first one has just computed."""
    daemon.script(spelled("x"), spelled("y"), cached_tokens=2)
    for end in ends(daemon, path, n=3):
        assert end["usage"]["prompt_tokens_details"] == {"cached_tokens": 2} and end["usage"]["completion_tokens"] == 3


def test_several_prompts_add_up(daemon: Scripted) -> None:
    daemon.script(spelled("x"), cached_tokens=2)
    usage = daemon.complete([[5], [5, 6], [5, 6, 7, 8]]).json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0 + 1 + 2}, "one token of a prompt is always computed"


@pytest.mark.parametrize("path", BASE)
def test_salt_pin_and_retention_reach_the_engine(daemon: Scripted, path: str) -> None:
    daemon.script(spelled("x"))
    bodies: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a" * 256, "pin_prompt": True},
        {"cache_salt": "", "pin_prompt": False},
        {"cache_salt": None, "pin_prompt": None},
    ]
    for fields in bodies:
        assert daemon.post(path, BASE[path] | {"stream": False} | fields).status == 200
    seen = [event["request"] for event in daemon.events("add")]
    assert [(request.get("salt", ""), request.get("pin")) for request in seen] == [
        ("", None),
        ("a" * 256, True),
        ("", False),
        ("", None),
    ]
    assert {request.get("retention", "rest") for request in seen} == {"chat" if "chat" in path else "rest"}
    for bad in ({"cache_salt": "é" * 129}, {"cache_salt": 5}, {"pin_prompt": "yes"}, {"pin_prompt": 1}):
        reply = daemon.post(path, BASE[path] | bad)
        assert (reply.status, reply.code) == (400, "invalid_request") and next(iter(bad)) in reply.body.decode()


def test_clients_are_told_apart_by_key_user_or_address(tiny_model: Path) -> None:
    with scripted_daemon(tiny_model, api_key="the key") as daemon:
        daemon.script(spelled("x"))

        def ask(kind: str, **headers: str) -> Reply:
            with daemon.client(kind) as client:
                client.send(post("/v1/chat/completions", BASE["/v1/chat/completions"], **headers))
                return client.reply()

        assert ask("tcp").status == 401
        assert [ask("tcp", **{"X-Api-Key": "the key"}).status, ask("unix", Authorization="Bearer the key").status] == [200, 200]
        assert [ask("unix").status, ask("unix", Authorization="Bearer another").status] == [200, 200]
        clients = [event["request"]["client"] for event in daemon.events("add")]
        assert clients[0] == clients[1] and clients[0].startswith("key:") and clients[2] == clients[3]
        assert clients[2].startswith("unix:") and "the key" not in str(daemon.events()) + daemon.log


def test_without_a_key_the_address_tells_clients_apart(daemon: Scripted) -> None:
    daemon.script(spelled("x"))
    for kind in ("tcp", "unix"):
        assert daemon.post("/v1/chat/completions", BASE["/v1/chat/completions"], kind).status == 200
    assert [event["request"]["client"].partition(":")[0] for event in daemon.events("add")] == ["tcp", "unix"]


def test_settings_reach_the_worker(tiny_model: Path) -> None:
    settings = {"target_itl_ms": "20", "priority_aging_s": "7", "prefix_cache": "off", "chat_retention_s": "60"}
    with scripted_daemon(tiny_model, rest_retention_s="5", **settings) as daemon:
        daemon.script(spelled("x"))
        daemon.chat()
        config = daemon.events("load")[0]["config"]
        digest = daemon.get("/api/tags").json["models"][0]["digest"]
        wanted = {"target_step_ms": 20.0, "aging_s": 7.0, "prefix_cache": False, "chat_retention_s": 60.0, "rest_retention_s": 5.0}
        assert config.items() >= wanted.items() and config["model_digest"].endswith(digest) and digest


def test_ps_and_metrics_show_the_cache_and_the_queue(daemon: Scripted) -> None:
    facts = {"pages_cached": 7, "pages_pinned": 3, "chunk_tokens": 96, "preemptions": 2, "accounting_errors": 1}
    daemon.script(spelled("x"), cached_tokens=4, evicted_pages=5, **facts)

    def read() -> dict[str, float]:
        lines = daemon.get("/metrics").body.decode().splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}

    before = read()
    assert daemon.post("/api/generate", {"model": MODEL}).status == 200
    [loaded] = daemon.get("/api/ps").json["models"]
    assert loaded["pages"] == {"total": 64, "used": 0, "cached": 0, "pinned": 0}, "before the first step"
    daemon.chat()
    [model] = daemon.get("/api/ps").json["models"]
    assert model["pages"] == {"total": 64, "used": 0, "cached": 7, "pinned": 3} and model["queue"] == {"running": 0, "waiting": 0}
    shown = {name: model[name] for name in ("chunk_tokens", "preemptions", "accounting_errors", "hit_tokens", "evicted_pages")}
    assert shown == {"chunk_tokens": 96, "preemptions": 2, "accounting_errors": 1, "hit_tokens": 4, "evicted_pages": 5}
    after = read()
    states = {name: value for name, value in after.items() if name.startswith("cavectl:kv_pages")}
    assert states == {f'cavectl:kv_pages{{state="{s}"}}': n for s, n in {"used": 0, "cached": 7, "pinned": 3, "free": 54}.items()}
    grown = {name: after[name] - before[name] for name in after if name.startswith("cavectl:") and name.endswith("_total")}
    assert grown["cavectl:preemptions_total"] == 2 and grown["cavectl:evicted_pages_total"] == 5
    assert grown["cavectl:accounting_errors_total"] == 1 and grown["cavectl:cached_tokens_total"] == 4
    daemon.unload()
    gone = read()
    assert all(gone[name] >= after[name] for name in after if name.endswith("_total")), "a model that goes takes no count with it"


def test_ps_while_some_wait(daemon: Scripted) -> None:
    daemon.script(spelled("x"), repeat=True, every_ms=20, max_running=2)
    with daemon.client() as one:
        one.send(post("/v1/chat/completions", BASE["/v1/chat/completions"] | {"n": 5}))
        until(lambda: {"running": 2, "waiting": 3} in [m.get("queue") for m in daemon.get("/api/ps").json["models"]] or None)
