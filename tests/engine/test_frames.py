"""Framing over a real socketpair: whole messages or a MalformedFrame, however the bytes arrive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from engine.frames import MalformedFrame, encode_frame, read_frame
from engine.types import MAX_FRAME_BYTES, AbortRequest, AddRequest, Command, EngineRequest, Shutdown

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def _read(stream: socket.socket) -> Command | None:
    return read_frame(stream, msgspec.msgpack.Decoder(Command))


def test_messages_come_out_as_they_went_in(pair: Pair) -> None:
    sent = [AddRequest(EngineRequest(id=1, prompt=[1, 2], max_tokens=3)), AbortRequest(1, 2), Shutdown()]
    for message in sent:
        pair[0].sendall(encode_frame(message))
    pair[0].close()
    assert [_read(pair[1]) for _ in sent] == sent
    assert _read(pair[1]) is None


def test_a_message_may_arrive_byte_by_byte(pair: Pair) -> None:
    message = AddRequest(EngineRequest(id=1, prompt=list(range(300)), max_tokens=3))

    def dribble() -> None:
        for byte in encode_frame(message):
            pair[0].sendall(bytes([byte]))

    writer = threading.Thread(target=dribble)
    writer.start()
    assert _read(pair[1]) == message
    writer.join()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 12])
def test_a_stream_that_ends_inside_a_frame_is_malformed(pair: Pair, cut: int) -> None:
    pair[0].sendall(encode_frame(AbortRequest(1, 2))[:cut])
    pair[0].close()
    with pytest.raises(MalformedFrame, match="ended inside"):
        _read(pair[1])


def test_a_frame_that_claims_too_much_is_refused_before_its_body(pair: Pair) -> None:
    pair[0].sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(MalformedFrame, match="claims"):
        _read(pair[1])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode({"type": "reboot"}),
        msgspec.msgpack.encode({"type": "abort", "request": "one"}),
        msgspec.msgpack.encode({"request": 1}),
        b"\x91" * 5000 + b"\x90",
        b"\x81\xa4type" * 3000,
    ],
)
def test_a_body_that_is_no_command_is_malformed(pair: Pair, body: bytes) -> None:
    pair[0].sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(MalformedFrame):
        _read(pair[1])


def test_a_message_too_long_to_send_is_refused_here() -> None:
    with pytest.raises(MalformedFrame, match="longer"):
        encode_frame(AddRequest(EngineRequest(id=1, prompt=[1 << 60] * (MAX_FRAME_BYTES // 8), max_tokens=1)))
