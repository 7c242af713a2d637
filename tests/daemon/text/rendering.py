"""Rendering in tests: a host with limits of its own, and what comes of a template as text or as an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from daemon.text.chat_template import ChatTemplate, TemplateHost
from engine.errors import CavectlError

USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Limits:
    template_timeout_s: float = 30.0
    template_memory_bytes: int = 256 << 20


def run(scenario: Callable[[TemplateHost], Awaitable[Any]], *, timeout_s: float = 5.0, helpers: int = 1) -> Any:
    async def main() -> Any:
        host = TemplateHost(Limits(timeout_s), helpers)
        try:
            return await scenario(host)
        finally:
            await host.close()

    return asyncio.run(main())


async def text_of(
    host: TemplateHost, template: ChatTemplate | str, messages: list[dict[str, Any]] | None = None, **options: Any
) -> str:
    defaults: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "specials": [], "max_output_bytes": 100_000}
    pieces = await host.render(template, [USER] if messages is None else messages, **(defaults | options))
    return "".join(piece.text for piece in pieces)


async def error_of(
    host: TemplateHost, template: ChatTemplate | str, messages: list[dict[str, Any]] | None = None, **options: Any
) -> CavectlError:
    with pytest.raises(CavectlError) as error:
        await text_of(host, template, messages, **options)
    assert "\n" not in error.value.message
    return error.value
