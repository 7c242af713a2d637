"""S19: what a request may look like on the wire, checked with raw bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon.wire import Harness, serving

POST = b"POST /scope HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with serving(tmp_path_factory.mktemp("d")) as harness:
        yield harness


MALFORMED = {
    "both lengths": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "both lengths, other order": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
    "two equal lengths": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    "listed lengths": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "signed length": (POST + b"Content-Length: +3\r\n\r\nabc", 400),
    "negative length": (POST + b"Content-Length: -3\r\n\r\nabc", 400),
    "hexadecimal length": (POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
    "empty length": (POST + b"Content-Length:\r\n\r\nabc", 400),
    "huge length": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "unknown coding": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "coding before chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "coding after chunked": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "identity coding": (POST + b"Transfer-Encoding: identity\r\n\r\n", 400),
    "chunked in 1.0": (b"POST /scope HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "space before colon": (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "control before value": (POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "bare LF": (b"GET /scope HTTP/1.1\nHost: localhost\n\n", 400),
    "bare LF after a header": (b"GET /scope HTTP/1.1\r\nHost: localhost\n\r\n", 400),
    "bare CR in a value": (b"GET /scope HTTP/1.1\r\nHost: localhost\r\nX: a\rY: b\r\n\r\n", 400),
    "NUL in a value": (b"GET /scope HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n", 400),
    "folded header": (b"GET /scope HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", 400),
    "folded first header": (b"GET /scope HTTP/1.1\r\n Host: localhost\r\n\r\n", 400),
    "nameless header": (b"GET /scope HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n", 400),
    "space in a name": (b"GET /scope HTTP/1.1\r\nHo st: localhost\r\n\r\n", 400),
    "chunk size of letters": (CHUNKED + b"zz\r\n\r\n", 400),
    "chunk size with a sign": (CHUNKED + b"-1\r\n", 400),
    "chunk size in C style": (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
    "chunk size beyond 64 bits": (CHUNKED + b"fffffffffffffffff\r\n", 400),
    "chunk ends with LF": (CHUNKED + b"3\nabc\r\n0\r\n\r\n", 400),
    "chunk longer than said": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "no version": (b"GET /scope\r\n\r\n", 505),
    "HTTP/2 by name": (b"GET /scope HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "unknown version": (b"GET /scope HTTP/1.2\r\nHost: localhost\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)), 400),
    "garbage": (bytes(range(128, 256)) * 4, 400),
    "RTSP": (b"DESCRIBE / RTSP/1.0\r\n\r\n", 501),
    "lower-case method": (b"get /scope HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "CONNECT": (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "TRACE": (b"TRACE /scope HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "space in the target": (b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "unquoted letter in the target": (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "other scheme": (b"GET ftp://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "other expectation": (POST + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\n", 417),
    "gzip body": (POST + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", 415),
    "zstd body": (POST + b"Content-Encoding: zstd\r\nContent-Length: 1\r\n\r\nx", 415),
    "two codings": (POST + b"Content-Encoding: identity, gzip\r\nContent-Length: 1\r\n\r\nx", 415),
    "body beyond the cap": (POST + b"Content-Length: %d\r\n\r\n" % (32 * 2**20 + 1), 413),
}


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_is_refused_and_closes(harness: Harness, name: str, kind: str) -> None:
    data, status = MALFORMED[name]
    before = len(harness.probe.events)
    with harness.client(kind) as client:
        client.send(data + b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (status, "close")
        assert reply.headers["content-type"] == "application/json"
        assert reply.code in {"invalid_request", "unsupported", "too_large"}
        assert client.ended()
    assert "scope /smuggled" not in harness.probe.events[before:]


GOOD = {
    "plain": (POST + b"Content-Length: 3\r\n\r\nabc", "abc"),
    "chunks": (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "abcde"),
    "chunk extension and trailer": (CHUNKED + b"3;a=b\r\nabc\r\n0\r\nHost: evil\r\nT: v\r\n\r\n", "abc"),
    "mixed case": (POST + b"TRANSFER-encoding: Chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", "a"),
    "identity content": (POST + b"Content-Encoding: identity\r\nContent-Length: 1\r\n\r\na", "a"),
    "empty lines first": (b"\r\n\r\n" + POST + b"Content-Length: 1\r\n\r\na", "a"),
    "upgrade is ignored": (POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\nbody", "body"),
    "upgrade with chunks": (
        POST + b"Connection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        "a",
    ),
}


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", GOOD)
def test_good_request_in_pieces_keeps_the_connection(harness: Harness, name: str, step: int) -> None:
    data, body = GOOD[name]
    with harness.client() as client:
        for _ in range(2):
            for start in range(0, len(data), step):
                client.send(data[start : start + step])
            reply = client.reply()
            assert (reply.status, reply.json["body"]) == (200, body)
            names = [header for header, _value in reply.json["headers"]]
            assert "t" not in names and names.count("host") == 1, "a trailer became a header"


def test_expect_continue_is_answered_before_the_body(harness: Harness) -> None:
    with harness.client() as client:
        client.send(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert client.head()[0] == 100
        client.send(b"abc")
        assert client.reply().json["body"] == "abc"


def test_expect_continue_refused_early_closes(harness: Harness) -> None:
    with harness.client() as client:
        client.send(b"POST /ignore HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 30\r\n\r\n")
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert client.ended()


def test_absolute_target_names_the_host(harness: Harness) -> None:
    reply = harness.once(b"GET http://127.0.0.1:99/scope?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (reply.json["path"], reply.json["query"]) == ("/scope", "a=b")
    assert dict(reply.json["headers"])["host"] == "127.0.0.1:99"
    assert harness.once(b"GET http://evil.example/scope HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 403
    assert harness.once(b"GET http://localhost:1@evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 403


def test_http_1_0_closes(harness: Harness) -> None:
    with harness.client() as client:
        client.send(b"GET /scope HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
        assert client.reply().headers["connection"] == "close"
        assert client.ended()


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 414)])
def test_request_line_cap_is_exact(harness: Harness, over: int, status: int) -> None:
    target = b"/scope?" + b"a" * (8192 - len(b"GET /scope? HTTP/1.1") + over)
    assert harness.once(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").status == status


@pytest.mark.parametrize(("count", "status"), [(99, 200), (100, 431)])
def test_header_count_cap_is_exact(harness: Harness, count: int, status: int) -> None:
    data = b"GET /scope HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * count + b"\r\n"
    assert harness.once(data).status == status


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 431)])
def test_header_bytes_cap_is_exact(harness: Harness, over: int, status: int) -> None:
    value = b"v" * (32768 - len(b"Host: localhost\r\nX: \r\n") + over)
    assert harness.once(b"GET /scope HTTP/1.1\r\nHost: localhost\r\nX: " + value + b"\r\n\r\n").status == status


@pytest.mark.parametrize(("size", "status"), [(32 * 2**20, 200), (32 * 2**20 + 1, 413)])
def test_chunked_body_cap_is_exact(harness: Harness, size: int, status: int) -> None:
    with harness.client() as client:
        client.send(b"POST /count HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, size, 2**20):
            piece = min(2**20, size - start)
            client.send(b"%x\r\n" % piece + b"x" * piece + b"\r\n")
        client.send(b"0\r\n\r\n")
        assert client.reply().status == status


def test_error_on_v1_has_the_shape_of_that_dialect(harness: Harness) -> None:
    shown = harness.once(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: br\r\n\r\n").json["error"]
    assert set(shown) == {"message", "type", "param", "code"} and shown["type"] == "invalid_request_error"


def test_failure_of_a_route_says_nothing_of_its_cause(harness: Harness) -> None:
    reply = harness.once(b"GET /fail HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (reply.status, reply.code) == (500, "internal_error")
    for secret in (b"secret", b"0xdead", b"Traceback", b"/home"):
        assert secret not in reply.body


def test_head_request_to_an_error_has_no_body(harness: Harness) -> None:
    with harness.client() as client:
        client.send(b"HEAD /health HTTP/1.1\r\nHost: evil\r\n\r\nGET /scope HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.reply(bodiless=True).status == 403
        assert client.reply().status == 200
