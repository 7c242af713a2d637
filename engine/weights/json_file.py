"""Reads JSON that came with a model.

Owned here: bounds on size, nesting and duplicate keys. Not here: what the keys mean. Invariant: memory and time are bounded by the
bytes given, a key that is there twice is refused (two readers would disagree on it), and every failure is CorruptFile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import CorruptFile
from engine.weights.files import ModelFile

MAX_JSON_BYTES = 32 << 20


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    file = ModelFile(path)
    try:
        if file.size > max_bytes:
            raise file.corrupt(f"has {file.size} bytes, more than {max_bytes}")
        return parse_json_object(file.read(0, file.size), file.corrupt)
    finally:
        file.close()


def parse_json_object(data: bytes, corrupt: Callable[[str], CorruptFile], max_values: int = 4_000_000) -> dict[str, Any]:
    """The object in `data`. `max_values` bounds what separators could make of it, before anything is built."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > max_values:
        raise corrupt("holds too many values")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise corrupt("has a key twice in one object")
        return found

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise corrupt("is not valid JSON") from error
    if not isinstance(value, dict):
        raise corrupt("is not a JSON object")
    return value
