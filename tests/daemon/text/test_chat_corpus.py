"""Every chat template of llama.cpp's tree, rendered as transformers renders it: equal text, or both refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from daemon.text.chat_template import TemplateHost
from engine.errors import CavectlError
from tests.daemon.text.conftest import SourcePackage

SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Rayleigh scattering."}
AGAIN = {"role": "user", "content": "  And   red\nat dusk? é🙂 \"quoted\" <b> & 'x' "}
CALL = {"type": "function", "id": "call12345", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, AGAIN],
    "system-turns": [SYSTEM, USER, ANSWER, AGAIN],
    "ends-with-answer": [SYSTEM, USER, ANSWER],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "Think of light."}, AGAIN],
    "thought-in-text": [USER, {"role": "assistant", "content": "<think>\nLight.\n</think>\n\nScattering."}, AGAIN],
    "null-content": [USER, {"role": "assistant", "content": None}, AGAIN],
    "empty-content": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": " blue?"}]}],
    "tool-call": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"sun": true}'},
    ],
    "two-users": [USER, AGAIN],
    "none": [],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
FLAT_TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameter_definitions": {"city": {"description": "Its name", "type": "str", "required": True}},
}
TOOLS: dict[str, list[dict[str, Any]] | None] = {"none": None, "openai": [TOOL], "flat": [FLAT_TOOL]}
BOS, EOS = "<s>", "</s>"
NEED_MORE = {"fireworks-ai-llama-3-firefunction-v2"}  # reads variables that no chat has
NOT_RENDERED = object()


def by_transformers(template: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> object:
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        [text], _ = render_jinja_template(
            [kept], tools=tools, chat_template=template, add_generation_prompt=prompt, bos_token=BOS, eos_token=EOS
        )
    except Exception:
        return NOT_RENDERED
    return text


async def by_host(host: TemplateHost, template: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> object:
    try:
        pieces = await host.render(
            template,
            messages,
            tools=tools,
            add_generation_prompt=prompt,
            bos_token=BOS,
            eos_token=EOS,
            specials=[BOS, EOS, "<|im_start|>", "<|im_end|>"],
            max_output_bytes=1 << 20,
        )
    except CavectlError as error:
        assert error.code == "template_error", error
        return NOT_RENDERED
    return "".join(piece.text for piece in pieces)


@pytest.mark.timeout(600)
def test_every_template_renders_as_transformers_does(
    host: TemplateHost, runner: asyncio.Runner, source_package: SourcePackage
) -> None:
    templates = source_package.templates()
    assert len(templates) >= 60
    rendered: dict[str, int] = dict.fromkeys(templates, 0)
    for name, template in templates.items():
        for title, messages in CONVERSATIONS.items():
            for kind, tools in TOOLS.items():
                for prompt in (False, True):
                    expected = by_transformers(template, messages, tools, prompt)
                    ours = runner.run(by_host(host, template, messages, tools, prompt))
                    assert ours == expected, (name, title, kind, prompt)
                    rendered[name] += expected is not NOT_RENDERED
    assert {name for name, count in rendered.items() if count < 6} == NEED_MORE
