"""Wrong requests of every kind on every route: the right status, a JSON error with a stable code, nothing of our insides (S29)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from engine.errors import ErrorCode
from tests.daemon.scripted import INSIDES, MODEL, Scripted, post, spelled
from tests.daemon.wire import Client, Reply

CODES = set(get_args(ErrorCode))
POSTS = ["/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/import"]
MALFORMED = [
    *(b"", b"null", b"[]", b"{", b"{} x", b'{"model": NaN}', b'{"model": "\\ud800"}', b'{"model": "\xff"}', b"\xef\xbb\xbf{}"),
    *(b"[" * 10**6, b'{"a":' * 10**5, b'{"model": "a", "model": "b"}', b'{"model": ' + b"1" * 5000 + b"}"),
]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "q"}]}


def check(reply: Reply, status: int, code: str) -> None:
    """An error as every error must look."""
    assert reply.status == status and reply.code == code, (reply.status, reply.body)
    assert reply.headers["content-type"] == "application/json"
    body = reply.json
    error = body["error"] if isinstance(body["error"], dict) else {"message": body["error"], **body}
    assert error["message"] and "\n" not in error["message"] and error["code"] in CODES
    assert not INSIDES.search(reply.body.decode()) and "/tmp/" not in reply.body.decode(), reply.body


@pytest.fixture(scope="module", autouse=True)
def still_works(session_daemon: Scripted) -> Iterator[None]:
    """After all of it the daemon answers, and its log has no traceback."""
    session_daemon.script(spelled("o", "k"))
    before = session_daemon.log.count("Traceback")
    yield
    assert session_daemon.chat().json["choices"][0]["message"]["content"] == "ok"
    assert session_daemon.log.count("Traceback") == before


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", MALFORMED, ids=map(str, range(len(MALFORMED))))
def test_s21_malformed_json(session_daemon: Scripted, path: str, body: bytes) -> None:
    check(session_daemon.post(path, body), 400, "invalid_request")


@pytest.mark.parametrize("name", ["nobody/nothing", "tiny/rnd", "hf.co/nobody/nothing"])
def test_unknown_models(session_daemon: Scripted, name: str) -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        reply = session_daemon.post(path, CHAT | {"model": name})
        check(reply, 404, "model_not_found")
        assert "hint" in reply.body.decode()
    check(session_daemon.post("/v1/completions", {"model": name, "prompt": "x"}), 404, "model_not_found")
    check(session_daemon.post("/api/generate", {"model": name, "keep_alive": 0}), 404, "model_not_found")
    check(session_daemon.post("/api/show", {"model": name}), 404, "model_not_found")
    check(session_daemon.get(f"/v1/models/{name}"), 404, "model_not_found")


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "a/b/../c", "a\x00b", "x" * 1025, "hf.co/a b/c", "~", "C:\\x", "%2e%2e/x"]
)
def test_names_that_are_no_names(session_daemon: Scripted, name: str) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT | {"model": name}),
        ("/api/show", {"model": name}),
        ("/api/pull", {"model": name}),
    ):
        reply = session_daemon.post(path, body)
        assert reply.status in (400, 404), reply.body
        check(reply, reply.status, reply.code)
    reply = session_daemon.post("/api/delete", {"model": name}, method="DELETE")
    check(reply, reply.status, reply.code)
    assert reply.status in (400, 404)


@pytest.mark.parametrize("path", ["/api/pull", "/api/show", "/api/delete"])
def test_missing_name(session_daemon: Scripted, path: str) -> None:
    check(session_daemon.post(path, {}, method="DELETE" if path.endswith("delete") else "POST"), 400, "invalid_request")


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/api/nope", "/v1/chat", "/api", "/v1/chat/completions/x"])
def test_unknown_routes(session_daemon: Scripted, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        reply = session_daemon.post(path, {}, method=method)
        check(reply, 404, reply.code)


def test_wrong_methods(session_daemon: Scripted) -> None:
    for path in POSTS:
        reply = session_daemon.get(path)
        check(reply, 405, reply.code)
        assert "POST" in reply.headers["allow"]
    for path in ("/api/tags", "/v1/models", "/"):
        reply = session_daemon.post(path, {})
        check(reply, 405, reply.code)


def test_import_of_what_is_not_there(session_daemon: Scripted) -> None:
    for path in ("/nowhere/model.gguf", "relative.gguf", "/etc", "/etc/hostname"):
        reply = session_daemon.post("/api/import", {"path": path, "name": "x/y", "stream": False})
        assert reply.status >= 400 and reply.code in CODES
    check(session_daemon.post("/api/import", {"path": "/x.gguf", "mode": "steal"}), 400, "invalid_request")
    check(session_daemon.post("/api/import", {"name": "x/y"}), 400, "invalid_request")


def test_the_connection_lives_on_after_an_error(session_daemon: Scripted) -> None:
    with session_daemon.client() as client:
        for _ in range(3):
            client.send(post("/v1/chat/completions", b"{"))
            assert client.reply().status == 400
            client.send(post("/v1/chat/completions", CHAT | {"max_tokens": 1}))
            assert client.reply().status == 200


def half(client: Client, data: bytes) -> None:
    client.send(data[: len(data) // 2])
    client.close()


def test_a_client_that_leaves_in_mid_body(session_daemon: Scripted) -> None:
    for path in POSTS:
        half(session_daemon.client(), post(path, CHAT))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_wrong_types(session_daemon: Scripted, path: str) -> None:
    wrong: list[dict[str, Any]] = [
        {"model": 1},
        {"messages": {}},
        {"messages": [[]]},
        {"messages": [{"role": 1, "content": "x"}]},
        {"messages": [{"role": "user", "content": {"text": "x"}}]},
        {"stream": 1},
        {"keep_alive": "soon"},
        {"stop": [[]]} if path.startswith("/v1") else {"options": {"stop": [[]]}},
        {"options": []} if path.startswith("/api") else {"stream_options": []},
    ]
    for fields in wrong:
        check(session_daemon.post(path, CHAT | fields), 400, "invalid_request")


def test_errors_say_nothing_of_the_inside(session_daemon: Scripted) -> None:
    """An error of ours that nobody foresaw: no text of the exception reaches the client, the log has it under the request's id."""
    from daemon.api.errors import body_of, known

    error = known(RuntimeError("secret /root/x.py 0xdeadbeef"), "req-1")
    for dialect in ("openai", "ollama"):
        assert not INSIDES.search(json.dumps(body_of(error, dialect)))
    assert error.code == "internal_error" and "req-1" in error.hint
