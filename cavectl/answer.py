"""One answer of a model: asked for, written as it comes, and measured.

The text goes to stdout exactly as the daemon sends it, each piece when it arrives, and ends with a newline: the model's own, or one
added. Leaving early, by an error or by Ctrl-C, closes the connection, which cancels the request.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cavectl.client import Client
from cavectl.output import Console
from engine.errors import CavectlError

_PATIENCE_S = 0.7  # before a person is told what is being waited for

Message = dict[str, str]


class Request(NamedTuple):
    route: str
    body: dict[str, Any]


@dataclass
class Question:
    """What every request of a run or a chat has in common."""

    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    context_tokens: int = 0  # 0: what the daemon loads the model with
    keep_alive: str = ""  # "": the daemon's setting

    def chat(self, messages: list[Message]) -> Request:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return Request("/api/chat", {"messages": [*system, *messages], **self._common()})

    def raw(self, prompt: str) -> Request:
        return Request("/api/generate", {"prompt": prompt, "raw": True, **self._common()})

    def load(self) -> Request:
        """Without a prompt: the model is loaded, with room for what the questions to come may need."""
        body: dict[str, Any] = {"model": self.model, "stream": False}
        return Request("/api/generate", body | ({"ctx": self.context_tokens} if self.context_tokens else {}))

    def _common(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if self.options:
            body["options"] = self.options
        if self.context_tokens:
            body["ctx"] = self.context_tokens
        if self.keep_alive:
            body["keep_alive"] = _keep_alive(self.keep_alive)
        return body


@dataclass
class Answer:
    """The text so far, and the last event once it is complete."""

    text: str = ""
    final: dict[str, Any] = field(default_factory=dict)

    @property
    def was_cut(self) -> bool:
        return self.final.get("done_reason") == "length"


def stream_answer(client: Client, request: Request, console: Console, answer: Answer) -> None:
    """Ask, and write the answer to stdout; fills `answer` as it goes, so that an interrupted one keeps its beginning."""
    try:
        with Waiting(console, f"waiting for {request.body['model']}") as waiting, client.stream(*request) as events:
            for event in events:
                piece = _text_of(event)
                if piece:
                    waiting.end()
                    answer.text += piece
                    console.write(piece)
                if event.get("done"):
                    answer.final = event
    except BaseException:
        if answer.text and console.stdout_is_terminal:
            console.line()
        raise
    if not answer.final:
        raise CavectlError("the answer ended before it was complete", hint="cavectl daemon logs", code="worker_died")
    if answer.text and not answer.text.endswith("\n"):
        console.line()


class Waiting:
    """Says on a terminal what is being waited for, when it takes long, and takes the line back."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._text = text
        self._lock = threading.Lock()
        self._ended = console.dumb or not console.stderr_is_terminal
        self._shown = False
        self._timer = threading.Timer(_PATIENCE_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Waiting:
        if not self._ended:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._console.status(f"{self._text} ...")
                self._shown = True

    def end(self) -> None:
        if self._ended and not self._shown:
            return
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._shown:
                self._console.status("\r\x1b[K")
                self._shown = False


def _text_of(event: dict[str, Any]) -> str:
    message = event.get("message")
    text = message.get("content", "") if isinstance(message, dict) else event.get("response", "")
    return text if isinstance(text, str) else ""


def _keep_alive(text: str) -> str | float:
    """Seconds as a number; anything else, such as 10m, as it is."""
    try:
        return float(text)
    except ValueError:
        return text
