"""Has `python -m engine.pack` make a model's packed weights: in a child that can be killed, under a memory limit and a time limit.

Owned here: the child, and that a model without packed weights is a good model: whatever goes wrong while it is pulled or imported
is logged, and the worker packs when it loads. Not here: any file format. Invariant: what is not whole never has the packed file's
name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

import daemon
from daemon.interpreter import python_module
from daemon.store.children import run_child
from daemon.store.manifests import FileRecord, PullEvent, weights_digest
from daemon.store.names import ModelName
from daemon.store.paths import PACKED
from daemon.store.progress import Progress
from daemon.store.staging import Staging
from engine.errors import CavectlError, ErrorInfo
from engine.types import PackReport

_LOG = logging.getLogger("cavectl.store")
_EXPECTED = frozenset({"unsupported_model", "device_unavailable"})  # this machine or model has no use for packed weights
_ANSWER_BYTES = 1 << 20
_MAPPED = 4  # source and packed file are mapped whole; the latter is at most 2.4 times as large (Q2_K)

Decoded = TypeVar("Decoded")


class Packer(Protocol):
    async def pack(self, weights: Path, target: Path, digest: str) -> PackReport: ...


@dataclass(frozen=True, slots=True)
class ChildPacker:
    """`command` gets the arguments appended. The limits grow with the model."""

    memory_limit_bytes: int = 4 << 30
    timeout_s: float = 120.0
    more_s_per_gb: float = 100.0
    keep_free_bytes: int = 0
    command: tuple[str, ...] = tuple(python_module("engine.pack"))

    async def pack(self, weights: Path, target: Path, digest: str) -> PackReport:
        """Packs unless `target` is fresh. CavectlError says why it was not done."""
        size = await asyncio.to_thread(_bytes_of, weights)
        limit = self.memory_limit_bytes + _MAPPED * size
        argv = [*self.command, str(weights), "--target", str(target), "--digest", digest]
        argv += ["--memory-limit-bytes", str(limit), "--keep-free-bytes", str(self.keep_free_bytes)]
        root = Path(next(iter(daemon.__path__))).parent  # the engine lies beside the daemon, and -m finds that one
        try:
            async with asyncio.timeout(self.timeout_s + self.more_s_per_gb * size / 1e9):
                result = await run_child(argv, cwd=root, limit_bytes=_ANSWER_BYTES)
        except TimeoutError:
            raise CavectlError(f"packing {weights.name} took too long", code="store_error") from None
        if result.code == 0:
            return _decode(result.output, PackReport)
        if result.code == 1:
            raise CavectlError.from_info(_decode(result.output, ErrorInfo))
        raise CavectlError(f"packing {weights.name} ended with {result.ending}", code="store_error")


@dataclass(frozen=True, slots=True)
class Packing:
    """Packing on the way into the store. `packer` None: nothing is packed."""

    packer: Packer | None

    async def prepare(
        self, name: ModelName, weights: Path, staging: Staging, files: Iterable[FileRecord], progress: Progress
    ) -> None:
        """Puts the packed weights into the folder in which the model is put together; never fails for want of them."""
        if self.packer is None:
            return
        progress(PullEvent(status="packing weights"))
        try:
            await self.packer.pack(weights, staging.file(PACKED), weights_digest(files))
        except CavectlError as error:
            level = logging.INFO if error.code in _EXPECTED else logging.WARNING
            _LOG.log(level, "%s is kept without packed weights: %s", name, error.message)


def _bytes_of(weights: Path) -> int:
    files = weights.iterdir() if weights.is_dir() else [weights]
    return sum(file.stat().st_size for file in files if file.is_file())


def _decode(data: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CavectlError(f"what the packing child said cannot be read: {error}", code="store_error") from error
