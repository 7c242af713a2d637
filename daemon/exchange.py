"""One request and its response on a connection: bounded writes, errors in JSON, an id, and a word for a client that is gone.

Builds on uvicorn's RequestResponseCycle, which does the framing and gives the application its `receive` and `send`. Every body part
is written when it is sent, never gathered; a part larger than WRITE_BYTES is written in pieces, each waiting for the reader.
"""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from daemon.refusal import REQUEST_ID, Refusal, id_header, send_refusal

WRITE_BYTES = 65536
"""Largest single write, and the buffered bytes from which a response waits for its reader."""


class Exchange(RequestResponseCycle):
    """See the module."""

    @property
    def request_id(self) -> str:
        return cast("dict[str, Any]", self.scope)["extensions"][REQUEST_ID]

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), id_header(self.request_id)]}
            if self.waiting_for_100_continue:
                self.keep_alive = False  # the client may or may not send its body now: nothing after this can be framed
        body = message.get("body", b"")
        if len(body) <= WRITE_BYTES:
            await super().send(message)
            return
        for start in range(0, len(body), WRITE_BYTES):
            more = message.get("more_body", False) or start + WRITE_BYTES < len(body)
            await super().send({"type": "http.response.body", "body": bytes(body[start : start + WRITE_BYTES]), "more_body": more})

    async def send_500_response(self) -> None:
        refusal = Refusal(500, "internal_error", "internal error", hint="the daemon's log has the cause")
        await send_refusal(self.send, refusal, self.scope["path"], ((b"connection", b"close"),))

    def disconnect(self) -> None:
        """The client is gone: what the application still sends is dropped, and its `receive` says so."""
        self.disconnected = True
        self.message_event.set()
