"""A pseudo-terminal with a command in it, for tests of what a person sees."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

from tests.cavectl.conftest import ROOT

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78])")


class Terminal:
    """Both streams of the command are one terminal of 24 x 80. `text` is all that came so far, without escape sequences."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self._fd = fd
        self.process = process
        self.raw = b""
        self._seen = 0

    @property
    def text(self) -> str:
        return _ESCAPES.sub(b"", self.raw).decode("utf-8", "replace").replace("\r\n", "\n")

    def send(self, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        while data:
            data = data[os.write(self._fd, data[:512]) :]
            self._pump(0.0)

    def expect(self, text: str, timeout_s: float = 30) -> str:
        """Wait until `text` appears after what an earlier call found; gives all between."""
        deadline = time.monotonic() + timeout_s
        while (place := self.text.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text[self._seen :]!r}"
            if not self._pump(0.1) and self.process.poll() is not None and not self._pump(0.2):
                raise AssertionError(f"ended with {self.process.returncode} before {text!r}: {self.text[self._seen :]!r}")
        between, self._seen = self.text[self._seen : place], place + len(text)
        return between

    def interrupt(self) -> None:
        """What the terminal does on Ctrl-C outside the line editor."""
        self.send(b"\x03")

    def wait(self, timeout_s: float = 30) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.text[-500:]!r}"
            self._pump(0.05)
        while self._pump(0.05):
            pass
        return self.process.returncode

    def _pump(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += data
        return bool(data)


@contextmanager
def terminal(environ: dict[str, str], *arguments: str, cwd: Path = ROOT) -> Iterator[Terminal]:
    """Run `python -m cavectl` in a terminal; it is killed when the block ends before it does."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "cavectl", *arguments]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True, "preexec_fn": _own_terminal}
    process: subprocess.Popen[bytes] = subprocess.Popen(command, env=environ, cwd=cwd, **streams)  # type: ignore[call-overload]
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)


def _own_terminal() -> None:
    ioctl(0, termios.TIOCSCTTY, 0)
