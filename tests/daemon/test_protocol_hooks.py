"""The parts of uvicorn that daemon/protocol.py, exchange.py and server.py build on. If one fails: read what changed, then adapt."""

from __future__ import annotations

import inspect
from importlib import metadata

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from daemon.exchange import Exchange
from daemon.protocol import Connection


def test_uvicorn_is_the_version_that_was_read() -> None:
    assert metadata.version("uvicorn") == "0.54.0"


OVERRIDDEN = {
    HttpToolsProtocol: {
        "connection_made": ["self", "transport"],
        "connection_lost": ["self", "exc"],
        "eof_received": ["self"],
        "data_received": ["self", "data"],
        "pause_writing": ["self"],
        "resume_writing": ["self"],
        "on_message_begin": ["self"],
        "on_url": ["self", "url"],
        "on_header": ["self", "name", "value"],
        "on_headers_complete": ["self"],
        "on_body": ["self", "body"],
        "on_message_complete": ["self"],
        "on_response_complete": ["self"],
        "_start_asgi_task": ["self", "cycle", "app"],
    },
    RequestResponseCycle: {
        "send": ["self", "message"],
        "send_500_response": ["self"],
        "receive": ["self"],
        "run_asgi": ["self", "app"],
    },
    uvicorn.Server: {
        "startup": ["self", "sockets"],
        "shutdown": ["self", "sockets"],
        "on_tick": ["self", "counter"],
        "capture_signals": ["self"],
    },
}


@pytest.mark.parametrize("base", OVERRIDDEN)
def test_overridden_methods_have_the_signatures_we_override(base: type) -> None:
    for name, parameters in OVERRIDDEN[base].items():
        assert list(inspect.signature(getattr(base, name)).parameters) == parameters, name


def test_our_methods_replace_methods_that_exist() -> None:
    own = {"_feed", "_ignore_upgrade", "_check_head", "_read_target", "_new_exchange", "_queue", "busy", "refuse", "evict", "check"}
    own |= {"forgive", "_check_closing", "_check_presence", "_identify", "_check_user", "_disconnect", "_drop", "_linger"}
    own |= {"on_chunk_complete"}  # httptools calls it; uvicorn does not use it
    defined = {name for name, value in vars(Connection).items() if callable(value) or isinstance(value, property)}
    defined -= {"__init__"}
    assert defined - own == set(OVERRIDDEN[HttpToolsProtocol])
    assert not [name for name in own if hasattr(HttpToolsProtocol, name)], "a name of ours collides with one of uvicorn's"


def test_attributes_we_read_and_set_exist() -> None:
    source = inspect.getsource(HttpToolsProtocol.__init__)
    for name in (
        "app",
        "loop",
        "parser",
        "transport",
        "flow",
        "client",
        "pipeline",
        "scope",
        "headers",
        "expect_100_continue",
        "cycle",
    ):
        assert f"self.{name}" in source, name
    cycle = inspect.getsource(RequestResponseCycle.__init__)
    for name in (
        "disconnected",
        "keep_alive",
        "waiting_for_100_continue",
        "message_event",
        "response_started",
        "response_complete",
    ):
        assert f"self.{name} = " in cycle, name
    assert set(inspect.signature(Exchange).parameters) == {
        "scope",
        "transport",
        "flow",
        "logger",
        "access_logger",
        "access_log",
        "default_headers",
        "message_event",
        "expect_100_continue",
        "keep_alive",
        "on_response",
    }


def test_behaviour_of_the_base_that_ours_leans_on() -> None:
    receive = inspect.getsource(RequestResponseCycle.receive)
    assert "self.flow.resume_reading()" in receive, "an application that waits for a disconnect must see the end of the stream"
    send = inspect.getsource(RequestResponseCycle.send)
    assert "if self.flow.write_paused and not self.disconnected:" in send, "a response must wait for a slow reader"
    assert "self.on_response()" in send and "if not self.keep_alive:\n                    self.transport.close()" in send
    body = inspect.getsource(HttpToolsProtocol.on_body)
    assert "self.cycle.body += body" in body and "self.flow.pause_reading()" in body
    assert httptools_impl.HIGH_WATER_LIMIT == 65536


def test_a_callback_error_keeps_its_cause() -> None:
    class Failing:
        def on_url(self, url: bytes) -> None:
            raise LookupError("x")

    with pytest.raises(httptools.HttpParserError) as caught:
        httptools.HttpRequestParser(Failing()).feed_data(b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(caught.value.__context__, LookupError)
