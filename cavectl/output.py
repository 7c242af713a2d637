"""The terminal side of a command: data goes to stdout, everything else to stderr.

Text is written as UTF-8 bytes whatever the locale says, so no output can fail to encode. On its way to a terminal it loses its
control characters (an escape sequence of a model could retitle the window or fill the clipboard), to a file or a pipe nothing.
A reader that has gone away raises OutputClosed: it has what it wanted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, TextIO

from engine.errors import CavectlError

_UNSAFE = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)], "\ufffd") | {ord("\r"): ""}


class OutputClosed(Exception):
    """Nobody reads stdout any more."""


class Console:
    """The three standard streams, and what they can show."""

    def __init__(self, stdin: TextIO | None, stdout: TextIO | None, stderr: TextIO | None, environ: Mapping[str, str]) -> None:
        self.stdin = stdin.buffer if stdin else None
        self._stdout = stdout.buffer if stdout else None
        self._stderr = stderr.buffer if stderr else None
        self.stdin_is_terminal = bool(stdin) and stdin.isatty()
        self.stdout_is_terminal = bool(stdout) and stdout.isatty()
        self.stderr_is_terminal = bool(stderr) and stderr.isatty()
        self.dumb = environ.get("TERM", "") in ("", "dumb")
        self.colour = not self.dumb and not environ.get("NO_COLOR")

    @classmethod
    def standard(cls) -> Console:
        return cls(sys.stdin, sys.stdout, sys.stderr, os.environ)

    def write(self, text: str) -> None:
        """Text to stdout, there when this returns."""
        if self.stdout_is_terminal:
            text = text.translate(_UNSAFE)
        if self._stdout is None:
            return
        try:
            self._stdout.write(encode(text))
            self._stdout.flush()
        except (BrokenPipeError, ConnectionResetError):
            _abandon(self._stdout)
            raise OutputClosed from None
        except OSError as error:
            _abandon(self._stdout)
            code = "no_space" if error.errno == errno.ENOSPC else "internal_error"
            raise CavectlError(f"cannot write the output: {error.strerror}", code=code) from error

    def line(self, text: str = "") -> None:
        self.write(text + "\n")

    def document(self, value: Any) -> None:
        """One JSON document, for `--json`."""
        import msgspec

        self.line(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            self.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def note(self, text: str) -> None:
        """A line for the person, never data."""
        self.status(text.translate(_UNSAFE) + "\n")

    def status(self, text: str) -> None:
        """Raw text to stderr; a stderr that is gone is no reason to fail."""
        if self._stderr is None:
            return
        try:
            self._stderr.write(encode(text))
            self._stderr.flush()
        except OSError:
            return

    def error(self, error: CavectlError) -> None:
        self._labelled("error", "31", error.message)
        if error.hint:
            self._labelled("hint", "36", error.hint)

    def _labelled(self, label: str, colour: str, text: str) -> None:
        text = " ".join(text.translate(_UNSAFE).split("\n"))
        styled = f"\x1b[1;{colour}m{label}:\x1b[0m" if self.colour and self.stderr_is_terminal else f"{label}:"
        self.status(f"{styled} {text}\n")


def encode(text: str) -> bytes:
    """UTF-8. Bytes of a file name that were no text come out as they were; other lone surrogates become `?`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def _abandon(stream: BinaryIO) -> None:
    """Point a stream at nothing, so that the interpreter's last flush cannot fail either."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def size(count: int) -> str:
    """Bytes for people: 98 MB."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.1f} {unit}" if unit != "B" and value < 10 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError("the last unit always returns")


def duration(seconds: float) -> str:
    """Time for people, in its largest unit: 4 minutes."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= length or unit == "second":
            count = max(0, int(seconds // length))
            return f"{count} {unit}{'' if count == 1 else 's'}"
    raise AssertionError("the last unit always returns")
