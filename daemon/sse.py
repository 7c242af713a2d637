"""How a stream of JSON values is written: server-sent events for OpenAI's routes, one JSON object a line for Ollama's.

Only bytes: when they are sent is daemon/answer.py. Invariant: only whole events are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from daemon.api.errors import Dialect, body_of
from engine.errors import CavectlError

_encode = msgspec.json.Encoder().encode

SSE_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """`ping`: what may be sent while nothing happens, b"" where a format has no such thing."""

    dialect: Dialect
    media_type: str
    prefix: bytes
    suffix: bytes
    end: bytes
    ping: bytes

    def event(self, value: Any) -> bytes:
        return self.prefix + _encode(value) + self.suffix

    def error(self, error: CavectlError) -> bytes:
        """The last event of a stream that failed, with what ends every stream."""
        return self.event(body_of(error, self.dialect)) + self.end


SSE = Framing("openai", "text/event-stream; charset=utf-8", b"data: ", b"\n\n", SSE_DONE, b": ping\n\n")
NDJSON = Framing("ollama", "application/x-ndjson", b"", b"\n", b"", b"")
