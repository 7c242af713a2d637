"""The process that renders chat templates: `python -I template_worker.py MEMORY_BYTES SECONDS`, frames on stdin and stdout.

Owns: the sandbox, the limits a process can set on itself, and the sentinels that keep request text from becoming control tokens.
Not here: the wall clock of a request (chat_template kills this process). Imports jinja2 and msgspec alone, and no module of ours.
A template is untrusted code. It sees an immutable sandbox with `range`, `dict`, `namespace`, `raise_exception`, `strftime_now`;
there is no loader, so include, import and extends fail. Invariant: one frame in, one frame out, whatever the template does.
A frame is its length as 4 bytes little-endian and a msgpack `RenderRequest` or `RenderReply`.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`nonce`: digits nobody outside can know, from which sentinels are made. `context`: variables beside the messages."""

    template: str
    messages: list[dict[str, Any]]
    request_context: dict[str, Any]  # from the request: its text is guarded like that of the messages
    context: dict[str, Any]  # from the model
    specials: list[str]
    nonce: str
    continue_final: bool
    max_output_bytes: int


class RenderReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Either `pieces` (text, may hold control tokens), or why there are none."""

    pieces: list[tuple[str, bool]] = []
    error: str = ""


class RenderError(Exception):
    """A template that asks for failure, or renders what cannot be used. The message is meant for a person."""


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)`, without names that lead into the interpreter."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} is private")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, which alone would render a forbidden attribute as nothing; here it ends the render."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (read by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise RenderError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` as a function: the type itself has more to offer than templates need."""
    return dict(*args, **kwargs)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    safe_range = environment.globals["range"]
    environment.globals.clear()
    environment.globals.update(
        range=safe_range, dict=_dict, namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    environment.filters["tojson"] = _tojson
    return environment.from_string(template)


class Guard:
    """Puts a sentinel in place of each spelling of a special token in request text, and cuts rendered text at sentinels.

    The end of a text that is the beginning of a spelling is guarded too, or two texts rendered side by side could complete one.
    A sentinel is digits alone: it survives trimming, changes of case and JSON.
    """

    def __init__(self, specials: Iterable[str], nonce: str) -> None:
        self._nonce = nonce
        self._hidden: list[str] = []
        self._places: dict[str, int] = {}
        spellings = sorted(filter(None, specials), key=len, reverse=True)
        self._spelling = _spelling_pattern(tuple(spellings))
        self._beginnings = _beginnings(tuple(spellings))
        self._longest = max(map(len, spellings), default=0)
        self._sentinel = re.compile(rf"{nonce}(\d{{8}})")

    def hide(self, value: Any) -> Any:
        """`value` with every text in it guarded, keys of mappings included."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def cut(self, text: str) -> list[tuple[str, bool]]:
        """Pieces of rendered text: the template's own (True), and what was hidden (False)."""
        pieces: list[tuple[str, bool]] = []
        for number, part in enumerate(self._sentinel.split(text)):
            piece = (self._hidden_at(int(part)), False) if number % 2 else (part, True)
            if piece[0]:
                pieces.append(piece)
        return pieces

    def _hide_text(self, text: str) -> str:
        if self._spelling is None:
            return text
        text = self._spelling.sub(lambda found: self._sentinel_of(found[0]), text)
        if text.isidentifier():  # names such as roles are compared, and not cut in two to trick anybody
            return text
        kept = text.rstrip()
        for size in range(min(self._longest - 1, len(kept)), 0, -1):
            if kept[-size:] in self._beginnings:
                return kept[:-size] + self._sentinel_of(kept[-size:]) + text[len(kept) :]
        return text

    def _hidden_at(self, place: int) -> str:
        return self._hidden[place] if place < len(self._hidden) else ""  # a template may have cut a sentinel in two

    def _sentinel_of(self, spelling: str) -> str:
        if spelling not in self._places:
            self._places[spelling] = len(self._hidden)
            self._hidden.append(spelling)
        return f"{self._nonce}{self._places[spelling]:08d}"


@lru_cache(maxsize=4)
def _spelling_pattern(spellings: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


@lru_cache(maxsize=4)
def _beginnings(spellings: tuple[str, ...]) -> frozenset[str]:
    return frozenset(spelling[:size] for spelling in spellings for size in range(1, len(spelling)))


def render(request: RenderRequest) -> list[tuple[str, bool]]:
    """The prompt in pieces. Raises RenderError, or whatever the template raises."""
    guard = Guard(request.specials, request.nonce)
    messages = guard.hide(request.messages)
    end_mark = f"{request.nonce}{'9' * 8}"
    if request.continue_final:
        _append_to_text(messages[-1], end_mark)
    variables = {**request.context, **guard.hide(request.request_context), "messages": messages}
    text = _bounded(_compile(request.template).generate(variables), request.max_output_bytes)
    if request.continue_final:
        text, mark, _ = text.rpartition(end_mark)
        if not mark:
            raise RenderError("the template does not show the end of the last message, so it cannot be continued")
        text = text.replace(end_mark, "")
    return guard.cut(text)


def _append_to_text(message: dict[str, Any], mark: str) -> None:
    content = message.get("content")
    if isinstance(content, list):
        part = next((part for part in reversed(content) if isinstance(part, dict) and "text" in part), None)
        if part is None:
            raise RenderError("the last message has no text to continue")
        part["text"] += mark
    else:
        message["content"] = (content or "") + mark


def _bounded(chunks: Iterator[str], max_bytes: int) -> str:
    kept: list[str] = []
    room = max_bytes
    for chunk in chunks:
        room -= len(chunk.encode("utf-8", "surrogatepass"))
        if room < 0:
            raise RenderError(f"the template renders more than {max_bytes} bytes")
        kept.append(chunk)
    return "".join(kept)


def answer(frame: bytes) -> bytes:
    """One request to one reply; nothing that a template does gets past here, short of the end of the process."""
    try:
        reply = RenderReply(pieces=render(msgspec.msgpack.decode(frame, type=RenderRequest)))
        return msgspec.msgpack.encode(reply)
    except RenderError as error:
        message = str(error)
    except jinja2.TemplateSyntaxError as error:
        message = f"line {error.lineno}: {error.message}"
    except MemoryError:
        message = "the template needs too much memory"
    except RecursionError:
        message = "the template is nested too deeply"
    except Exception as error:  # untrusted code may raise anything
        message = f"{type(error).__name__}: {error}"
    line = " ".join(message[:300].encode("utf-8", "replace").decode().split())
    return msgspec.msgpack.encode(RenderReply(error=line or "the template failed"))


def serve(source: BinaryIO, sink: BinaryIO, seconds: float) -> None:
    """A render that nobody stops ends this process after `seconds`: the alarm's default is death, in any loop."""
    sink.write((0).to_bytes(4, "little"))  # an empty frame: ready
    sink.flush()
    while header := source.read(4):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply = answer(source.read(int.from_bytes(header, "little")))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(len(reply).to_bytes(4, "little") + reply)
        sink.flush()


def main() -> None:
    memory_bytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    serve(sys.stdin.buffer, sys.stdout.buffer, seconds)


if __name__ == "__main__":
    main()
