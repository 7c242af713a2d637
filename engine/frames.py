"""Frames on a stream socket: a length of 4 bytes, little-endian, then that many bytes of msgpack.

Both ends of a worker's socketpair speak it; types.py has the messages. Blocking I/O, one reader and one writer at a time.
Invariant: no frame is longer than MAX_FRAME_BYTES, and nothing is allocated for one that claims to be.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from engine.types import MAX_FRAME_BYTES

HEADER_BYTES = 4


class MalformedFrame(Exception):
    """The peer broke the format. The stream cannot be used further."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Header and body of one frame."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def read_frame(stream: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """The next message, None when the peer closed between frames. Raises MalformedFrame, and OSError of the socket."""
    header = _read_exactly(stream, HEADER_BYTES)
    if not header:
        return None
    size = int.from_bytes(header, "little")
    if size > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame claims {size} bytes, the limit is {MAX_FRAME_BYTES}")
    body = _read_exactly(stream, size)
    if size and not body:
        raise MalformedFrame("the stream ended inside a frame")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedFrame(f"a frame is not a message: {error}") from None


def _read_exactly(stream: socket.socket, size: int) -> bytes:
    """`size` bytes, b"" when the stream ended before the first of them."""
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        count = stream.recv_into(view[got:])
        if count == 0:
            if got == 0:
                return b""
            raise MalformedFrame("the stream ended inside a frame")
        got += count
    return bytes(buffer)
