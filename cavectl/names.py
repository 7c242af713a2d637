"""Names of the models at hand, kept in a small file so that the shell can complete them without asking the daemon.

The file is a copy: whoever lists models rewrites it, and nothing but completion trusts it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

DEFAULT_MODEL = "smollm2:135m"
_FILE = "model-names"


def remember(data_dir: Path, names: Iterable[str]) -> None:
    """Replace the list. A folder that cannot be written only costs completion."""
    text = "".join(f"{name}\n" for name in sorted(names))
    path = data_dir / _FILE
    if text == "".join(f"{name}\n" for name in remembered(data_dir)):
        return
    fresh = path.with_name(f"{_FILE}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return


def remembered(data_dir: Path) -> list[str]:
    try:
        return (data_dir / _FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def complete(arguments: list[str]) -> int:
    """`cavectl __complete models`: what the completion files call."""
    import sys

    from daemon.config import resolve

    if arguments == ["models"]:
        names = {DEFAULT_MODEL, *remembered(resolve().data_dir)}
        sys.stdout.write("".join(f"{name}\n" for name in sorted(names)))
        return 0
    return 2
