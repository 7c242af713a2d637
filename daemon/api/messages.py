"""Chat messages of both dialects, read into the one form that templates get: {"role", "content", ...} with text content.

Only text is understood. A part, role or key that stands for something else (image, tool call) is refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daemon.api.errors import BadField
from daemon.api.readers import Field, Nested, Str, Table

MAX_MESSAGES = 4096
MAX_PARTS = 1024

_ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Content:
    """A string, or a list of text parts joined by line breaks."""

    parts: bool

    def read(self, path: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not self.parts or not isinstance(value, list):
            raise BadField(path, f"`{path}` must be a string" + (" or a list of parts" if self.parts else ""))
        if len(value) > MAX_PARTS:
            raise BadField(path, f"`{path}` must have at most {MAX_PARTS} parts")
        return "\n".join(_text_of(f"{path}[{number}]", part) for number, part in enumerate(value))


def _text_of(path: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise BadField(path, f"`{path}` must be an object with a `type`")
    if kind not in ("text", "input_text"):
        raise BadField(path, f"`{path}` is of type {kind[:40]!r}, only text is supported", code="unsupported")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadField(f"{path}.text", f"`{path}.text` must be a string")
    return text


@dataclass(frozen=True, slots=True)
class Role:
    def read(self, path: str, value: Any) -> str:
        if value in ("tool", "function") and isinstance(value, str):
            raise BadField(path, f"`{path}`: messages of tools are not supported", code="unsupported")
        role = _ROLES.get(value) if isinstance(value, str) else None
        if role is None:
            raise BadField(path, f"`{path}` must be one of {', '.join(_ROLES)}")
        return role


@dataclass(frozen=True, slots=True)
class Messages:
    """A list of messages; absent content is the empty text."""

    table: Table

    def read(self, path: str, value: Any) -> Nested:
        if not isinstance(value, list) or len(value) > MAX_MESSAGES:
            raise BadField(path, f"`{path}` must be a list of at most {MAX_MESSAGES} messages")
        messages, ignored = [], {}
        for number, item in enumerate(value):
            fields = self.table.read_fields(f"{path}[{number}]", item)
            messages.append({"content": "", **fields.values})
            ignored |= {f"{path}[].{name.rpartition('.')[2]}": True for name in fields.ignored}
        return Nested(messages, list(ignored))


def _message(*rows: Field, parts: bool, refused: Mapping[str, Any]) -> Messages:
    """`refused`: names with the one value of each, besides null, that stands for nothing."""
    return Messages(
        Table.of(
            [Field("role", Role(), required=True), Field("content", Content(parts)), *rows],
            [Field(name, kind="refused", neutral=(nothing,)) for name, nothing in refused.items()],
        )
    )


OPENAI_MESSAGES = _message(
    Field("name", Str(256)),
    Field("reasoning_content", Str()),
    Field("reasoning", kind="no_effect"),  # the same text under its other name
    Field("annotations", kind="no_effect"),
    parts=True,
    refused={"tool_calls": [], "tool_call_id": "", "function_call": {}, "refusal": "", "audio": {}},
)

OLLAMA_MESSAGES = _message(
    Field("thinking", Str()),
    parts=False,
    refused={"images": [], "tool_calls": [], "tool_name": "", "tool_call_id": ""},
)
