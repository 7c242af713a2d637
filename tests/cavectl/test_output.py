"""Bytes that reach the streams: UTF-8 always, exact when piped, harmless on a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cavectl.output import Console, duration, encode, size
from engine.errors import CavectlError


class Stream(io.TextIOWrapper):
    def __init__(self, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def written(self) -> bytes:
        buffer: Any = self.buffer
        return buffer.getvalue()


def console(terminal: bool, **environ: str) -> tuple[Console, Stream, Stream]:
    out, error = Stream(terminal), Stream(terminal)
    return Console(None, out, error, {"TERM": "xterm"} | environ), out, error


def test_piped_text_is_exact() -> None:
    shown, out, _ = console(False)
    text = "é 🙂 \x1b[31m\r\n\x07\x00"
    shown.write(text)
    assert out.written == text.encode()


def test_a_terminal_gets_no_control_characters() -> None:
    shown, out, _ = console(True)
    shown.write("a\x1b]52;c;AAAA\x07b\r\n\tc\x9bd")
    assert out.written.decode() == "a\ufffd]52;c;AAAA\ufffdb\n\tc\ufffdd"


@pytest.mark.parametrize(
    ("text", "data"),
    [("Ж", b"\xd0\x96"), ("\udcff.gguf", b"\xff.gguf"), ("\ud83d", b"?"), ("e\u0301", b"e\xcc\x81")],
)
def test_nothing_fails_to_encode(text: str, data: bytes) -> None:
    assert encode(text) == data


def test_errors_are_one_line_with_a_hint() -> None:
    shown, out, error = console(False)
    shown.error(CavectlError("two\nlines \x1b[0m", hint="try"))
    assert error.written == "error: two lines \ufffd[0m\nhint: try\n".encode()
    assert out.written == b""


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals_that_want_it(environ: dict[str, str], coloured: bool) -> None:
    shown, _, error = console(True, **environ)
    shown.error(CavectlError("no"))
    assert (b"\x1b" in error.written) is coloured


def test_tables_line_up() -> None:
    shown, out, _ = console(False)
    shown.table(("A", "LONG"), [("wide cell", "x"), ("y", "z")])
    assert out.written.decode() == "A          LONG\nwide cell  x\ny          z\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (98_362_432, "98 MB"), (999_600_000, "1.0 GB"), (10**16, "10000 TB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 seconds"), (1, "1 second"), (119, "1 minute"), (7200, "2 hours"), (86400 * 3, "3 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
