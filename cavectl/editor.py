"""The line editor of the chat: prompt_toolkit, with Enter to send, Ctrl-J for a newline, and blocks in triple quotes.

History goes to a file that only its owner reads; an entry of several lines comes back as one. A paste arrives whole, newlines
included, and waits for Enter.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output

FENCE = '"""'
PROMPT, CONTINUATION = ">>> ", "... "
PLACEHOLDER = "Send a message (/? for help)"
_KEPT_ENTRIES = 1000


class Editor:
    """Reads messages from the terminal. `read` raises EOFError on Ctrl-D and KeyboardInterrupt on Ctrl-C."""

    def __init__(self, history: Path, colour: bool) -> None:
        self._file = history
        self._style = "ansibrightblack" if colour else ""
        self._session = self._open(_file_history(history))

    def read(self) -> str:
        return unfenced(self._session.prompt())

    def keep_history(self, keep: bool) -> None:
        """Whether what is typed from now on is written to the file."""
        self._session = self._open(_file_history(self._file) if keep else InMemoryHistory())

    def _open(self, history: History) -> PromptSession[str]:
        return PromptSession(
            PROMPT,
            history=history,
            multiline=True,
            key_bindings=_bindings(),
            placeholder=FormattedText([(self._style, PLACEHOLDER)]),
            prompt_continuation=CONTINUATION,
            enable_open_in_editor=True,
            output=_terminal(),
        )


@contextmanager
def held_keys() -> Iterator[None]:
    """What is typed between two prompts waits for the next one, as it was typed: it is not echoed into an answer, and Enter stays
    Enter (the terminal would make it the newline of Ctrl-J). Ctrl-C still interrupts.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    held[0] &= ~termios.ICRNL
    held[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(terminal, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def is_open(text: str) -> bool:
    """Whether a block in triple quotes has begun and not ended."""
    return text.lstrip().startswith(FENCE) and text.count(FENCE) % 2 == 1


def unfenced(text: str) -> str:
    """A message without the triple quotes around it."""
    inner = text.strip()
    if inner.startswith(FENCE) and inner.endswith(FENCE) and len(inner) >= 2 * len(FENCE):
        return inner[len(FENCE) : -len(FENCE)].strip("\n")
    return text


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _file_history(path: Path) -> FileHistory:
    """The history file, made readable for its owner only before anything is in it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    trim_history(path, _KEPT_ENTRIES)
    return FileHistory(str(path))


def trim_history(path: Path, kept: int) -> None:
    """Leave the last entries only. Each begins with a line that begins with #, and all its own lines begin with +."""
    start = b"\n# "
    _, *entries = path.read_bytes().split(start)
    if len(entries) <= kept:
        return
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        file.write(b"".join(start + entry for entry in entries[-kept:]))
    fresh.replace(path)


def _terminal() -> Vt100_Output:
    """The terminal, never asked where its cursor is: the prompt has no need, and an answer that comes late is read as typing."""
    output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
    output.enable_cpr = False
    return output
