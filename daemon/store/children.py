"""Runs a child process to its end: bounded output, killed with all its children when the caller is cancelled or times out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CavectlError

_READ_BYTES = 1 << 16
_KEPT_ERROR_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class ChildResult:
    """`code` is negative for a signal. `errors` is the end of what it wrote to stderr."""

    code: int
    output: bytes
    errors: str

    @property
    def ending(self) -> str:
        return f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"


async def run_child(argv: Sequence[str], *, cwd: Path, limit_bytes: int, environ: Mapping[str, str] | None = None) -> ChildResult:
    """Waits for the child. CavectlError when it cannot start (no_process) or prints more than `limit_bytes` (store_error)."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env=None if environ is None else dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or "no memory"
        raise CavectlError(
            f"cannot start {Path(argv[0]).name}: {why}", code="no_process", hint="close other programs, then try again"
        ) from error
    try:
        output, errors = await asyncio.gather(_read_up_to(process.stdout, limit_bytes), _read_tail(process.stderr))
        return ChildResult(await process.wait(), output, errors)
    finally:
        await _end(process)


async def _read_up_to(stream: asyncio.StreamReader | None, limit_bytes: int) -> bytes:
    assert stream is not None
    parts: list[bytes] = []
    while chunk := await stream.read(_READ_BYTES):
        limit_bytes -= len(chunk)
        if limit_bytes < 0:
            raise CavectlError("a child process printed too much", code="store_error")
        parts.append(chunk)
    return b"".join(parts)


async def _read_tail(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    tail = b""
    while chunk := await stream.read(_READ_BYTES):
        tail = (tail + chunk)[-_KEPT_ERROR_BYTES:]
    return tail.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills the child's whole group if it still runs, and reaps it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
