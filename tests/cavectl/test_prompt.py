"""How arguments and standard input become one prompt, and when standard input is left alone."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from cavectl.output import Console
from cavectl.prompt import StdinRule, clean, join, read_prompt
from engine.errors import InvalidRequest

Kind = Literal["pipe", "file", "null", "terminal", "closed"]


@contextmanager
def console(kind: Kind, data: bytes, folder: Path) -> Iterator[Console]:
    """A console whose stdin is really of that kind, with `data` in it."""
    ends: list[int] = []
    if kind == "closed":
        yield Console(None, None, None, {})
        return
    if kind == "pipe":
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
    elif kind == "file":
        (folder / "in").write_bytes(data)
        reader = os.open(folder / "in", os.O_RDONLY)
    elif kind == "null":
        reader = os.open(os.devnull, os.O_RDONLY)
    else:
        ours, reader = pty.openpty()
        ends.append(ours)
        os.write(ours, data + b"\x04")
    with io.TextIOWrapper(open(reader, "rb", closefd=True)) as stdin:
        yield Console(stdin, None, None, {})
    for end in ends:
        os.close(end)


CASES: list[tuple[Kind, list[str], StdinRule, bytes, str | None]] = [
    ("pipe", ["sum", "up"], "auto", b"text", "text sum up"),
    ("pipe", ["sum", "up"], "auto", b"text\n", "text\nsum up"),
    ("pipe", ["sum", "up"], "auto", b"text\n\n", "text\n\nsum up"),
    ("pipe", ["sum", "up"], "append", b"text\n", "sum up text"),
    ("pipe", ["sum", "up"], "never", b"text\n", "sum up"),
    ("pipe", [], "auto", b"text\n", "text"),
    ("pipe", [], "auto", b"  text\n\n", "  text\n"),
    ("pipe", ["a", "-", "b"], "auto", b"text", "a text b"),
    ("pipe", ["a", "-"], "append", b"text\n", "a text"),
    ("pipe", ["é"], "auto", "Ж\n".encode(), "Ж\né"),
    ("pipe", ["x"], "auto", b"", "x"),
    ("file", ["x"], "auto", b"text\n", "x"),
    ("file", ["x"], "prepend", b"text\n", "text\nx"),
    ("file", ["x", "-"], "auto", b"text\n", "x text"),
    ("file", [], "auto", b"text\n", "text"),
    ("null", ["x"], "auto", b"", "x"),
    ("null", [], "auto", b"", ""),
    ("terminal", ["x"], "auto", b"", "x"),
    ("terminal", [], "auto", b"", None),
    ("terminal", ["x"], "prepend", b"typed\n", "typed\nx"),
    ("closed", ["x"], "auto", b"", "x"),
    ("closed", [], "auto", b"", None),
]


@pytest.mark.parametrize(("kind", "words", "rule", "data", "prompt"), CASES)
def test_prompts(kind: Kind, words: list[str], rule: StdinRule, data: bytes, prompt: str | None, tmp_path: Path) -> None:
    with console(kind, data, tmp_path) as given:
        assert read_prompt(words, rule, given) == prompt


@pytest.mark.parametrize(
    ("kind", "words", "rule", "data"),
    [
        ("pipe", ["-", "-"], "auto", b""),
        ("pipe", ["-"], "never", b""),
        ("pipe", ["x"], "auto", b"\xff\xfe"),
        ("closed", ["-"], "auto", b""),
        ("pipe", ["\udcff"], "auto", b""),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(kind: Kind, words: list[str], rule: StdinRule, data: bytes, tmp_path: Path) -> None:
    with console(kind, data, tmp_path) as given, pytest.raises(InvalidRequest):
        read_prompt(words, rule, given)


def test_join_puts_one_separator() -> None:
    assert join("", "a", "", "b\n", "c", "") == "a b\nc"


def test_clean_keeps_text() -> None:
    assert clean("é🙂") == "é🙂"
