"""S15 to S18: who may ask, over raw sockets, and over every route of the real application."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon import security
from daemon.security import is_loopback
from daemon.server import load_application
from tests.daemon.process import ROOT, start
from tests.daemon.wire import Harness, Reply, serving, until

KEY = "sesame-öffne-dich"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with serving(
        tmp_path_factory.mktemp("d"), allowed_hosts=("box.lan",), allowed_origins=("http://app.example", "vscode-webview://x")
    ) as it:
        yield it


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The real application, with a key."""
    with serving(tmp_path_factory.mktemp("d"), load=load_application, api_key=KEY) as harness:
        until(lambda: harness.server.gate._app)
        yield harness


def ask(harness: Harness, method: str, path: str, kind: str = "tcp", **headers: str | list[str]) -> Reply:
    values = {"host": "localhost", "content-length": "0"} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1"]
    for name, value in values.items():
        lines += [f"{name}: {each}" for each in ([value] if isinstance(value, str) else value)]
    with harness.client(kind) as client:
        client.send("\r\n".join([*lines, "", ""]).encode())
        return client.reply(bodiless=method == "HEAD")


HOSTS: list[tuple[Any, int]] = [
    ("localhost", 200),
    ("LOCALHOST:11435", 200),
    ("localhost:1", 200),
    ("127.0.0.1", 200),
    ("127.0.0.1:65535", 200),
    ("[::1]", 200),
    ("[::1]:80", 200),
    ("host.docker.internal", 200),
    ("box.lan:80", 200),
    ("evil.com", 403),
    ("localhost.evil.com", 403),
    ("127.0.0.1.evil", 403),
    ("127.0.0.1.nip.io", 403),
    ("evil.localhost", 403),
    ("evil.internal", 403),
    ("localhost.", 403),
    ("0.0.0.0", 403),
    ("127.1", 403),
    ("2130706433", 403),
    ("[::ffff:127.0.0.1]", 403),
    ("::1", 400),
    ("localhost:99999", 400),
    ("localhost:0", 400),
    ("localhost:", 400),
    ("localhost:80:80", 400),
    ("user@localhost", 400),
    ("localhost, evil.com", 400),
    ("localhost/", 400),
    ("", 400),
    ([], 400),
    (["localhost", "localhost"], 400),
    (["localhost", "evil.com"], 400),
]


@pytest.mark.parametrize("path", ["/scope", "/health", "/v1/models"])
@pytest.mark.parametrize(("host", "status"), HOSTS, ids=str)
def test_host_table(harness: Harness, host: Any, status: int, path: str) -> None:
    harness.probe.events.clear()
    reply = ask(harness, "GET", path, host=host)
    assert reply.status == status
    if status != 200:
        assert reply.code in {"invalid_request", "forbidden"} and not harness.probe.events
    assert ask(harness, "GET", path, kind="unix", host=host).status == 200, "the peer's user counts on a Unix socket"


ORIGINS = {
    None: True,
    "http://app.example": True,
    "HTTP://APP.example": True,
    "vscode-webview://x": True,
    "https://app.example": False,
    "http://app.example.evil": False,
    "http://localhost": False,
    "http://localhost:11435": False,
    "null": False,
    "file://": False,
    "chrome-extension://abc": False,
    "": False,
}
TYPES = {
    "application/json": True,
    "Application/JSON; charset=utf-8": True,
    "text/plain": False,
    "application/x-www-form-urlencoded": False,
}
TYPES |= {"multipart/form-data": False, "application/jsonp": False, None: False}
SITES = [None, "none", "same-origin", "cross-site"]


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_cross_origin_matrix(harness: Harness, kind: str) -> None:
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    for origin, content_type, site, method in itertools.product(ORIGINS, TYPES, SITES, methods):
        headers = {"origin": origin, "content_type": content_type, "sec_fetch_site": site}
        reply = ask(harness, method, "/scope", kind, **{name: value for name, value in headers.items() if value is not None})
        browser = origin is not None or site is not None
        if not ORIGINS[origin] or (origin is None and site == "cross-site"):
            expected = 403
        elif browser and method not in {"GET", "HEAD"} and not TYPES[content_type]:
            expected = 415
        else:
            expected = 200
        assert reply.status == expected, (origin, content_type, site, method)
        listed = origin is not None and ORIGINS[origin]
        assert reply.headers.get("access-control-allow-origin") == (origin if listed else None)
        assert "access-control-allow-credentials" not in reply.headers
        assert not listed or reply.headers["vary"] == "Origin"


def test_two_origins_are_refused(harness: Harness) -> None:
    assert ask(harness, "GET", "/scope", origin=["http://app.example", "http://app.example"]).status == 403


def test_preflight(harness: Harness) -> None:
    wanted = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    reply = ask(harness, "OPTIONS", "/api/chat", origin="http://app.example", **wanted)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "http://app.example"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "content-type" in reply.headers["access-control-allow-headers"]
    reply = ask(harness, "OPTIONS", "/api/chat", origin="http://evil.example", **wanted)
    assert reply.status == 403 and not [name for name in reply.headers if name.startswith("access-control")]


def test_form_type_without_a_browser_is_ignored(harness: Harness) -> None:
    assert ask(harness, "POST", "/scope", content_type="application/x-www-form-urlencoded").status == 200


def routes(harness: Harness) -> list[tuple[str, str]]:
    gate = harness.server.gate
    table = [
        (route.path.replace("{id:path}", "x").replace("{id}", "x"), route.methods)
        for route in load_application().build_routes(gate._state)
    ]
    assert len(table) > 10
    return [(method, path) for path, methods in table for method in methods] + [
        ("GET", "/readyz"),
        ("GET", "/nowhere"),
        ("POST", "/health/x"),
    ]


WRONG: list[dict[str, Any]] = [
    {},
    {"authorization": "Bearer "},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": KEY},
    {"x_api_key": ""},
    {"api_key": KEY.upper()},
]


def test_every_route_needs_the_key(real: Harness) -> None:
    shapes = set()
    for (method, path), wrong in itertools.product(routes(real), WRONG):
        reply = ask(real, method, path, **wrong)
        assert reply.status == 401, (method, path, wrong)
        assert reply.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert reply.code == "unauthorized"
            shapes.add((path.startswith("/v1/"), reply.body))
    assert len(shapes) == 2, "the answer depends on more than the dialect"


@pytest.mark.parametrize(
    "right", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x_api_key": KEY}, {"api_key": KEY}]
)
def test_the_key_opens_in_each_header(real: Harness, right: dict[str, str]) -> None:
    assert ask(real, "GET", "/api/tags", **right).status == 200
    assert ask(real, "GET", "/v1/models", **right).status == 200


def test_health_needs_no_key_and_the_unix_socket_neither(real: Harness) -> None:
    assert ask(real, "GET", "/health").status == 200
    assert ask(real, "GET", "/healthz").status == 200
    assert ask(real, "GET", "/api/tags", kind="unix").status == 200
    assert ask(real, "GET", "/readyz", kind="unix").status == 200


def test_no_route_of_the_application_lets_a_stranger_origin_in(real: Harness) -> None:
    for method, path in routes(real):
        for content_type in ("application/json", "text/plain"):
            reply = ask(real, method, path, authorization=f"Bearer {KEY}", origin="http://evil.example", content_type=content_type)
            assert reply.status == 403, (method, path)


def test_unknown_routes_and_methods_answer_in_their_dialect(real: Harness) -> None:
    assert ask(real, "GET", "/api/nowhere", kind="unix").code == "invalid_request"
    assert set(ask(real, "GET", "/v1/nowhere", kind="unix").json["error"]) >= {"message", "type", "param", "code"}
    assert ask(real, "PUT", "/api/tags", kind="unix").status == 405
    assert ask(real, "POST", "/health", kind="unix").status == 405
    assert ask(real, "GET", "/api/tags/", kind="unix").status == 404, "no redirect is built from what a client sent"


def test_whoever_has_the_key_is_known_by_its_digest_on_both_sockets(tmp_path: Path) -> None:
    """For fairness between clients. Never the key itself, and never a wrong one's digest."""
    with serving(tmp_path, api_key="the key") as harness:
        keys = {
            (kind, name): ask(harness, "GET", "/scope", kind=kind, **headers).json["key"]
            for kind in ("tcp", "unix")
            for name, headers in (("bearer", {"authorization": "Bearer the key"}), ("x", {"x_api_key": "the key"}))
        }
        assert len(set(keys.values())) == 1 and re.fullmatch("[0-9a-f]{16}", keys["tcp", "x"])
        for wrong in ({}, {"x_api_key": "another"}):
            assert ask(harness, "GET", "/scope", kind="unix", **wrong).json["key"] is None
    with serving(tmp_path) as harness:
        assert ask(harness, "GET", "/scope", x_api_key="the key").json["key"] is None


def test_keys_are_compared_in_constant_time() -> None:
    tree = ast.parse(inspect.getsource(security))
    check = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_has_key")
    calls = [ast.unparse(node.func) for node in ast.walk(check) if isinstance(node, ast.Call)]
    assert "hmac.compare_digest" in calls
    comparisons = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert not [text for text in comparisons if "self.key" in text and "None" not in text]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.evil", False),
        ("box.lan", False),
    ],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "box.lan"])
def test_other_machines_need_a_key(tmp_path: Path, host: str) -> None:
    daemon = start(tmp_path, "--host", host, module="daemon")
    _, message = daemon.process.communicate(timeout=20)
    assert daemon.process.returncode == 2
    assert message.startswith("error: listening on ") and "CAVECTL_API_KEY" in message and message.count("\n") == 2
    assert not (tmp_path / "run" / "daemon.sock").exists()


def test_with_a_key_other_machines_are_let_in_but_not_by_any_name(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0", api_key="k") as harness:
        assert ask(harness, "GET", "/scope", x_api_key="k").status == 200
        assert ask(harness, "GET", "/scope").status == 401
        assert ask(harness, "GET", "/scope", host="0.0.0.0", x_api_key="k").status == 403


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as another user")
def test_another_user_is_refused_on_the_unix_socket(tmp_path: Path) -> None:
    code = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
os.chdir(sys.argv[1])
os.setuid(12345)
sock.connect("daemon.sock")
sock.sendall(b"GET /scope HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
sys.stdout.buffer.write(sock.makefile("rb").read(2000))
"""
    for allowed, status in (((), b"403"), (("12345",), b"200"), (("*",), b"200")):
        with serving(tmp_path, allowed_uids=allowed, idle_timeout_s=0.3) as harness:
            folder = harness.settings.socket.parent
            folder.chmod(0o711)  # the modes alone would already keep the other user out
            harness.settings.socket.chmod(0o666)
            command = [sys.executable, "-I", "-c", code, str(folder)]
            shown = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=20, check=True).stdout
            assert shown.split()[1] == status, shown
