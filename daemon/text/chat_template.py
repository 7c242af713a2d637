"""Chat templates: which one a model has, and the processes that render it.

Owns: `template_for`, and `TemplateHost`, which keeps warm helper processes (template_worker) and kills one that takes too long or
dies, so that a template can cost its own request and nothing else. Not here: the sandbox and the sentinels (template_worker).
Invariant: the event loop only moves bytes; a helper renders one request at a time and is not used again if it failed to answer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from daemon.text.tokenizer import Piece
from engine.errors import CavectlError, CorruptFile, InvalidRequest
from engine.types import ModelInfo

WORKER = Path(__file__).with_name("template_worker.py")
START_TIMEOUT_S = 30.0
MAX_TEMPLATE_BYTES = 1 << 20

# What a request may set for a template, beside messages and tools.
TEMPLATE_OPTIONS = frozenset(
    (
        *("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "keep_past_thinking", "preserve_thinking"),
        *("documents", "date_string", "model_identity", "add_vision_id"),
        *("builtin_tools", "custom_tools", "python_tools", "xml_tools", "tools_in_user_message"),
    )
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`with_tools` is used when a request brings tools and the model has a template of that name."""

    source: str
    with_tools: str | None = None

    def pick(self, tools: Sequence[Any] | None) -> str:
        return self.with_tools if tools and self.with_tools is not None else self.source


class Limits(Protocol):
    @property
    def template_timeout_s(self) -> float: ...
    @property
    def template_memory_bytes(self) -> int: ...


class TemplateHost:
    """Renders for all models of a daemon. Helpers start with the first request; `warm` starts them ahead of it."""

    def __init__(self, limits: Limits, helpers: int = 2) -> None:
        self._limits = limits
        self._free = asyncio.LifoQueue[_Helper]()
        for _ in range(helpers):
            self._free.put_nowait(_Helper(limits))
        self._all = helpers

    async def warm(self) -> None:
        helpers = [self._free.get_nowait() for _ in range(self._free.qsize())]
        try:
            await asyncio.gather(*(_started(helper) for helper in helpers))
        finally:
            for helper in helpers:
                self._free.put_nowait(helper)

    async def render(
        self,
        template: ChatTemplate | str,
        messages: Sequence[Mapping[str, Any]],
        *,
        bos_token: str,
        eos_token: str,
        specials: Sequence[str],
        max_output_bytes: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """Raises `invalid_request`, `template_error`, `template_timeout` or `no_process`.

        `continue_final_message`: the prompt ends with the text of the last message, which the model goes on writing.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                hint="one asks for a new answer, the other for more of the last message",
            )
        if continue_final_message and (not messages or messages[-1].get("role") != "assistant"):
            raise InvalidRequest("continue_final_message needs a last message of the assistant")
        request = {
            "template": template.pick(tools) if isinstance(template, ChatTemplate) else template,
            "messages": [_normalised(message) for message in messages],
            "request_context": {"tools": tools or None, "documents": None, **_allowed(extra or {})},
            "context": {"add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token},
            "specials": specials,
            "nonce": "".join(secrets.choice("0123456789") for _ in range(24)),
            "continue_final": continue_final_message,
            "max_output_bytes": max_output_bytes,
        }
        try:
            frame = msgspec.msgpack.encode(request)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest("the messages hold what no template can show (broken text, or numbers past 64 bits)") from error
        reply = msgspec.msgpack.decode(await self._exchange(frame), type=_Reply)
        if reply.error:
            raise CavectlError(f"the chat template failed: {reply.error}", code="template_error", hint=_TEMPLATE_HINT)
        return [Piece(text, special) for text, special in reply.pieces]

    async def close(self) -> None:
        """Waits for renders under way; the host is of no use afterwards."""
        for _ in range(self._all):
            await (await self._free.get()).stop()

    async def _exchange(self, frame: bytes) -> bytes:
        helper = await self._free.get()
        try:
            await _started(helper)
            return await asyncio.wait_for(helper.exchange(frame), self._limits.template_timeout_s)
        except TimeoutError as error:
            await helper.stop()
            seconds = f"{self._limits.template_timeout_s:g} s"
            raise CavectlError(f"the chat template took over {seconds}", code="template_timeout", hint=_TEMPLATE_HINT) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await helper.stop()
            raise CavectlError(
                "the process that renders chat templates ended", code="template_error", hint=_TEMPLATE_HINT
            ) from error
        except BaseException:  # cancelled: an answer is still on its way
            await asyncio.shield(helper.stop())
            raise
        finally:
            self._free.put_nowait(helper)


async def _started(helper: _Helper) -> None:
    try:
        await helper.start()
    except (OSError, EOFError, MemoryError) as error:  # among them: out of processes, files or time, ended at once
        raise CavectlError(
            "the process that renders chat templates does not start", code="no_process", hint="close other programs, then try again"
        ) from error


_TEMPLATE_HINT = "the template comes with the model; raw completion does not need it"


class _Reply(msgspec.Struct, frozen=True):
    pieces: list[tuple[str, bool]] = []
    error: str = ""


class _Helper:
    """One helper process, started when it is needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(WORKER), str(self._limits.template_memory_bytes)),
            str(2 * self._limits.template_timeout_s + 5),  # ends itself should nobody be left to do it
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key in ("TZ", "LANG", "LC_ALL")},
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._read_frame()
        except BaseException:  # cancelled too: the helper's first frame is still to come
            await asyncio.shield(self.stop())
            raise

    async def exchange(self, frame: bytes) -> bytes:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(len(frame).to_bytes(4, "little") + frame)
        await self._process.stdin.drain()
        return await self._read_frame()

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    async def _read_frame(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        header = await self._process.stdout.readexactly(4)
        return await self._process.stdout.readexactly(int.from_bytes(header, "little"))


def _normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null (templates test for presence), and with reasoning under each name that templates read it by."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in ("reasoning_content", "thinking", "reasoning") if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _allowed(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(extra.keys() - TEMPLATE_OPTIONS)
    if unknown:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(unknown)}", hint=f"allowed: {', '.join(sorted(TEMPLATE_OPTIONS))}"
        )
    return extra


def template_for(weights: Path, info: ModelInfo) -> ChatTemplate | None:
    """The template a model brings: of the GGUF, or of chat_template.jinja or tokenizer_config.json beside the weights."""
    if info.format == "gguf":
        return _checked(info.chat_template)
    folder = weights if weights.is_dir() else weights.parent
    file = folder / "chat_template.jinja"
    if file.is_file():
        _check_size(file.stat().st_size)
        return _checked(file.read_text(encoding="utf-8", errors="replace"))
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        found = msgspec.json.decode(config.read_bytes(), type=_TokenizerConfig).chat_template
    except msgspec.DecodeError as error:
        raise CorruptFile("tokenizer_config.json is not valid JSON, or its chat_template is no template") from error
    if not isinstance(found, list):
        return _checked(found)
    named = {entry.name: entry.template for entry in found}
    return _checked(named.get("default"), named.get("tool_use"))


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None


def _checked(source: str | None, with_tools: str | None = None) -> ChatTemplate | None:
    for text in filter(None, (source, with_tools)):
        _check_size(len(text.encode("utf-8", "surrogatepass")))
    return ChatTemplate(source, with_tools) if source is not None else None


def _check_size(size: int) -> None:
    if size > MAX_TEMPLATE_BYTES:
        raise CorruptFile(f"the chat template has {size} bytes, at most {MAX_TEMPLATE_BYTES} are read")
