"""Asks `python -m engine.inspect` what a model is: in a child that can be killed, under a memory limit and a time limit.

The child parses files from strangers; this side only decodes one bounded message that it prints. Not here: any file format.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

import daemon
from daemon.interpreter import python_module
from daemon.store.children import run_child
from daemon.store.manifests import MAX_INFO_BYTES
from engine.errors import CavectlError, CorruptFile, ErrorInfo
from engine.types import ModelInfo

Decoded = TypeVar("Decoded")


class Inspector(Protocol):
    async def inspect(self, path: Path) -> ModelInfo: ...


@dataclass(frozen=True, slots=True)
class ChildInspector:
    """`command` gets the path and the limit appended."""

    memory_limit_bytes: int = 4 << 30
    timeout_s: float = 120.0
    command: tuple[str, ...] = tuple(python_module("engine.inspect"))

    async def inspect(self, path: Path) -> ModelInfo:
        argv = [*self.command, str(path), "--memory-limit-bytes", str(self.memory_limit_bytes)]
        root = Path(next(iter(daemon.__path__))).parent  # the engine lies beside the daemon, and -m finds that one
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await run_child(argv, cwd=root, limit_bytes=MAX_INFO_BYTES)
        except TimeoutError:
            raise CorruptFile(f"{path.name} could not be read within {self.timeout_s:g} s") from None
        if result.code == 0:
            return self._decode(result.output, ModelInfo, path)
        if result.code == 1:
            raise CavectlError.from_info(self._decode(result.output, ErrorInfo, path))
        raise CorruptFile(
            f"reading {path.name} ended with {result.ending}", hint="the file may be damaged, or need too much memory"
        )

    def _decode(self, data: bytes, kind: type[Decoded], path: Path) -> Decoded:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptFile(f"the facts of {path.name} cannot be read: {error}") from error
