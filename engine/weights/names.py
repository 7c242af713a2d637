"""Which file names that come from inside a model may be opened.

Owned here: the rule for names in an index (S02). Invariant: a name that passes, joined to the model's folder, stays below it on any
platform, and no two names mean one file on a file system that ignores case.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_PARTS = 16
MAX_PART_BYTES = 255


def is_safe_name(name: str) -> bool:
    """Relative under POSIX and Windows rules; no empty, `.` or `..` part, backslash, colon or control character."""
    parts = name.split("/")
    if len(parts) > MAX_PARTS or any(character in "\\:" or not character.isprintable() for character in name):
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= MAX_PART_BYTES for part in parts)


def case_duplicates(names: Iterable[str]) -> list[str]:
    """Names of which another one differs in case only."""
    seen: dict[str, str] = {}
    return [name for name in names if seen.setdefault(name.casefold(), name) != name]
