"""Where the prompt of `run` comes from: the arguments and standard input.

Standard input is only read when it can be meant. Without prompt arguments: whenever it is no terminal. With them: only a pipe,
because cron, ssh -n, editors and `while read` loops leave something else there that is not for us. `-` and --stdin say otherwise.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Sequence
from typing import BinaryIO, Literal

from cavectl.output import Console
from engine.errors import InvalidRequest

StdinRule = Literal["auto", "never", "prepend", "append"]
_PATIENCE_S = 2.0


def read_prompt(words: Sequence[str], rule: StdinRule, console: Console) -> str | None:
    """The whole prompt; None when there is none, so that a chat is due."""
    words = [clean(word) for word in words]
    if "-" in words:
        if rule == "never" or words.count("-") > 1:
            raise InvalidRequest("`-` can stand for standard input once", hint="leave out --stdin=never, or all but one `-`")
        place = words.index("-")
        return join(" ".join(words[:place]), _read(console), " ".join(words[place + 1 :]))
    if not _is_wanted(bool(words), rule, console):
        return " ".join(words) if words else None
    text = _read(console)
    return join(" ".join(words), text) if rule == "append" else join(text, " ".join(words))


def join(*parts: str) -> str:
    """Parts with one separator between each two: the newline that a part ends with, or a space."""
    whole = ""
    for part in parts:
        if whole and part and not whole.endswith("\n"):
            whole += " "
        whole += part
    return whole.removesuffix("\n")


def clean(text: str) -> str:
    """Text as UTF-8 has it. Python marks other bytes of an argument with lone surrogates, which no JSON can carry."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise InvalidRequest("an argument is not UTF-8 text", hint="put the text in a file and pipe it in, as UTF-8") from None


def _is_wanted(has_words: bool, rule: StdinRule, console: Console) -> bool:
    if rule != "auto":
        return rule != "never"
    if console.stdin is None:
        return False
    return is_pipe(console.stdin) if has_words else not console.stdin_is_terminal


def is_pipe(stream: BinaryIO) -> bool:
    return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)


def _read(console: Console) -> str:
    if console.stdin is None:
        raise InvalidRequest("standard input is closed", hint="give the prompt as arguments")
    if not console.stdin_is_terminal and not select.select([console.stdin], [], [], _PATIENCE_S)[0]:
        console.note("waiting for standard input to end (--stdin=never leaves it alone)")
    try:
        return console.stdin.read().decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("standard input is not UTF-8 text", hint="convert it first, for example with iconv") from None
