"""Frames between the daemon and a worker, on the daemon's event loop: events in, commands out.

The format is that of engine/frames.py, which reads and writes it blockingly. Invariants: a frame is whole before it is decoded, and
one that claims to be too long, or is no message, ends the connection with the reason; what a worker sent before it ended is read,
also when the end is noticed by a command that no longer arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import cast

import msgspec

from engine.types import MAX_FRAME_BYTES, Command, Event

_HEADER_BYTES = 4
_READ_BYTES = 1 << 16


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream into frames. Decodes on arrival, without a task in between: a token waits for nothing."""

    def __init__(self, on_event: Callable[[Event], None], on_close: Callable[[str], None]) -> None:
        self._on_event, self._on_close = on_event, on_close
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._encoder = msgspec.msgpack.Encoder()
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        self._closed = False
        self._socket: socket.socket | None = None  # of our own: the transport drops what it has not read when a write fails

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))

    def send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = self._encoder.encode(command)
            self._transport.write(len(body).to_bytes(_HEADER_BYTES, "little") + body)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for frame in self._frames():
                self._on_event(self._decoder.decode(frame))
        except msgspec.MsgspecError as error:
            self._reason = f"sent a frame that cannot be read ({error})"
            self.close()

    def _frames(self) -> Iterator[bytes]:
        start = 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[start : start + _HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"{size} bytes announced")
            end = start + _HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _HEADER_BYTES : end])
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._socket is not None:
            with self._socket:
                self._read_rest(self._socket)
        self._on_close(self._reason)

    def _read_rest(self, unread: socket.socket) -> None:
        with contextlib.suppress(OSError):  # nothing more there, or the other side's reset
            while not self._closed and (data := unread.recv(_READ_BYTES, socket.MSG_DONTWAIT)):
                self.data_received(data)

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()
