"""How a person names a model: `smollm2:135m`, `hf.co/owner/repo[:quant-or-file]`, or the path of a file or folder.

Owns the grammar and the identity: two spellings that differ only in case or in Unicode composition are one model, a missing tag
is `latest`. Not here: what a name means (catalog.py, hub.py) and where its files lie (paths.py). Invariant: a `ModelName` that
exists is valid, so nothing after this has to check its parts again.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from daemon.store.paths import check_file_name
from engine.errors import CavectlError

HUB = "hf.co"
DEFAULT_TAG = "latest"
MAX_PART_CHARS = 96
_NEAR = 0.8  # one letter wrong, left out or doubled in a word of five
_HUB_PREFIXES = ("hf.co/", "huggingface.co/")
_HUB_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_\-])?")
_DIGEST_LIKE = re.compile(r"sha256[:\-]", re.IGNORECASE)


class InvalidName(CavectlError):
    code = "invalid_name"


@dataclass(frozen=True, slots=True)
class ModelName:
    """A checked name as the person wrote it. `owner` is "" for names of the catalog and of imports."""

    host: str
    owner: str
    name: str
    tag: str

    @property
    def display(self) -> str:
        return "/".join(part for part in (self.host, self.owner, self.name) if part) + f":{self.tag}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Equal for two names exactly when they mean the same model."""
        return (self.host, fold(self.owner), fold(self.name), fold(self.tag))

    @property
    def repo(self) -> str:
        """`owner/repo` as the hub spells it."""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        return self.display


def fold(text: str) -> str:
    """The form in which names are compared: composed, case folded."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..")


def parse_name(text: str) -> ModelName | Path:
    """The model name or absolute path that `text` is, or InvalidName."""
    if not text or len(text) > 4096 or not text.isprintable():
        raise InvalidName(f"{show(text)} is not a model name", hint="a name looks like smollm2:135m or hf.co/owner/repo")
    if is_path(text):
        return _parse_path(text)
    text = unicodedata.normalize("NFC", text)
    if _DIGEST_LIKE.match(text):
        raise InvalidName(f"{show(text)} is a digest, not a model name", hint="cavectl list shows the names")
    for prefix in _HUB_PREFIXES:
        if text.lower().startswith(prefix):
            return _parse_hub(text, text[len(prefix) :])
    return _parse_local(text)


def parse_model_name(text: str) -> ModelName:
    """Like `parse_name` where only a name will do."""
    name = parse_name(text)
    if isinstance(name, Path):
        raise InvalidName(f"{show(text)} is a path, not a model name", hint="a name looks like smollm2:135m or hf.co/owner/repo")
    return name


def name_from_path(path: Path) -> ModelName:
    """A name for an import that was given none: the file's stem or the folder's name, other characters as dashes."""
    stem = path.stem if path.suffix.lower() == ".gguf" else path.name
    cleaned = "".join(c if c.isalnum() or c in "._-" else "-" for c in unicodedata.normalize("NFC", stem)).strip("._-")
    return ModelName("", "", _check_local(cleaned[:MAX_PART_CHARS].strip("._-") or "model", stem), DEFAULT_TAG)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one most likely stands for; None when none is really near. A tag of its own does not count."""
    forms = {fold(text).removesuffix(f":{DEFAULT_TAG}"): text for text in known}
    near = difflib.get_close_matches(fold(name).removesuffix(f":{DEFAULT_TAG}"), forms, n=1, cutoff=_NEAR)
    return forms[near[0]] if near else None


def show(text: str) -> str:
    """`text` quoted for a one-line message, control characters escaped, cut at 80 characters; of a path its last part alone."""
    if is_path(text):
        text = text.rstrip("/").rpartition("/")[2] or text
    return ascii_controls(text if len(text) <= 80 else text[:77] + "...")


def ascii_controls(text: str) -> str:
    return '"' + "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text) + '"'


def _parse_path(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise InvalidName(f"{show(text)} is a relative path, not a model name", hint="cavectl list shows the names")
    return path


def _parse_hub(text: str, rest: str) -> ModelName:
    repo, colon, tag = rest.partition(":")
    owner, slash, name = repo.partition("/")
    if not slash or (colon and not tag):
        raise InvalidName(f"{show(text)} is not a hub name", hint="write hf.co/owner/repo or hf.co/owner/repo:Q4_K_M")
    for part in (owner, name):
        if len(part) > MAX_PART_CHARS or not _HUB_PART.fullmatch(part) or ".." in part or "--" in part:
            raise InvalidName(f"{show(part)} in {show(text)} cannot be part of a hub name")
    if tag:
        check_file_name(tag)
    return ModelName(HUB, owner, name, tag or DEFAULT_TAG)


def _parse_local(text: str) -> ModelName:
    path, colon, tag = text.partition(":")
    if colon and not tag:
        raise InvalidName(f"{show(text)} ends in a colon", hint="leave the colon out, or write the tag after it")
    owner, slash, name = path.rpartition("/")
    if slash:
        _check_local(owner, text)
    return ModelName("", owner, _check_local(name, text), _check_local(tag, text) if tag else DEFAULT_TAG)


def _check_local(part: str, whole: str) -> str:
    """Letters and digits of any script, with `._-+` between them."""
    inner = all(c.isalnum() or c in "._-+" or unicodedata.combining(c) for c in part)
    if not part or len(part) > MAX_PART_CHARS or not inner or not part[0].isalnum() or part[-1] in "._-+" or ".." in part:
        raise InvalidName(
            f"{show(part)} in {show(whole)} cannot be part of a model name",
            hint="use letters and digits, and ._-+ between them; a path starts with / or ./",
        )
    return part
