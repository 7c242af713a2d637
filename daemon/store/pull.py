"""Pulling: a plan from a source, space for it, every file held complete and hashed, then one registration.

Drives a Source, the shared downloads and the registry; knows neither HTTP nor pip. Invariant: nothing is registered before every
byte of every file hashed right, and all files of one pull are of one revision.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from daemon.store.downloads import HASH_STEP_BYTES, Downloads
from daemon.store.files import FileLayer, check_regular, open_root, read_chunks, storage_errors
from daemon.store.inspector import Inspector
from daemon.store.manifests import FORMAT, FileRecord, Manifest, PullEvent
from daemon.store.names import ModelName
from daemon.store.packer import Packing
from daemon.store.partials import DATA, Partial, Partials, WantedFile
from daemon.store.paths import StorePaths, below
from daemon.store.progress import Progress, file_reporter
from daemon.store.registry import Installed, Registry
from daemon.store.selection import INDEX, MAX_INDEX_BYTES, check_index, weights_entry
from daemon.store.sources import Plan, Report, Source, in_thread
from daemon.store.staging import Staging
from engine.errors import CavectlError


@dataclass(frozen=True, slots=True)
class Puller:
    layer: FileLayer
    paths: StorePaths
    registry: Registry
    partials: Partials
    downloads: Downloads
    inspector: Inspector
    packing: Packing
    headroom_bytes: int

    async def pull(self, name: ModelName, source: Source, progress: Progress) -> Installed:
        """The model as `source` has it now; what is installed already is not fetched again."""
        progress(PullEvent(status="pulling manifest"))
        plan = await source.plan()
        current = self._current(name, plan)
        if current is not None:
            return current
        self._check_space(plan, name, source)
        async with AsyncExitStack() as held:
            partials = [await held.enter_async_context(self._hold(file, plan, name, source, progress)) for file in plan.files]
            return await self._register(name, plan, partials, progress)

    def _current(self, name: ModelName, plan: Plan) -> Installed | None:
        """What is installed, when it is this very version and whole."""
        try:
            model = self.registry.installed(name)
        except CavectlError:  # unreadable: this pull repairs it
            return None
        if model is None or model.damaged or model.manifest.revision != plan.revision or model.manifest.mode == "in-place":
            return None
        here = {file.name: file for file in model.manifest.files}
        for wanted in plan.files:
            record = here.get(wanted.name)
            if record is None or record.size != wanted.size or _size(model.file_path(record)) != wanted.size:
                return None
            if wanted.check.kind == "sha256" and record.sha256 != wanted.check.value:
                return None
        return model if len(here) == len(plan.files) else None

    def _check_space(self, plan: Plan, name: ModelName, source: Source) -> None:
        with storage_errors("look at the free space"):
            with open_root(self.layer, self.paths.root):
                pass
            missing = sum(
                max(0, f.size - self.partials.partial_bytes(f)) for f in plan.files if not self._nearby(f, plan, name, source)
            )
            need = missing + (source.extra_bytes if missing else 0) + self.headroom_bytes
            have = self.layer.free_bytes(self.paths.root)
        if need > have:
            message = f"not enough space on the disk: need {human_bytes(need)}, have {human_bytes(have)}"
            raise CavectlError(message, code="no_space", hint="free some space, or remove models with cavectl rm")

    def _nearby(self, wanted: WantedFile, plan: Plan, name: ModelName, source: Source) -> list[Path]:
        """Files on this machine that may have the bytes: what lies where the model will, other models, the source's cache."""
        sha256 = wanted.check.value if wanted.check.kind == "sha256" else ""
        own = [path for file, path in self.registry.copies(wanted.size) if not sha256 or file.sha256 == sha256]
        own.insert(0, below(self.paths.model(name, plan.revision), wanted.name))
        return [path for path in [*own, *source.cached(wanted)] if _size(path) == wanted.size]

    def _hold(
        self, wanted: WantedFile, plan: Plan, name: ModelName, source: Source, progress: Progress
    ) -> AbstractAsyncContextManager[Partial]:
        report = file_reporter(f"pulling {wanted.name}", wanted.name, wanted.size, progress, wanted.digest)

        async def fill(partial: Partial, shared_report: Report) -> None:
            if not await self._adopt(partial, plan, name, source):
                await source.fetch(plan, wanted, partial, shared_report)

        return self.downloads.hold(wanted, name, fill, report)

    async def _adopt(self, partial: Partial, plan: Plan, name: ModelName, source: Source) -> bool:
        """Links a local copy whose hash is right. A partial that holds bytes already is worth more than a look around."""
        if partial.size:
            return False
        for path in self._nearby(partial.wanted, plan, name, source):
            try:
                if partial.adopt_link(path):
                    while await in_thread(partial.hash_more, HASH_STEP_BYTES):
                        pass
                else:  # on another file system
                    await in_thread(_copy, path, partial)
            except (FileNotFoundError, PermissionError):
                continue
            if partial.matches:
                return True
        partial.restart()
        return False

    async def _register(self, name: ModelName, plan: Plan, partials: list[Partial], progress: Progress) -> Installed:
        progress(PullEvent(status="verifying sha256 digest"))
        with storage_errors(f"store {name}"), self.registry.stage() as staging:
            for partial in partials:
                staging.link(DATA, partial.folder_fd, partial.wanted.name)
            names = [file.name for file in plan.files]
            await in_thread(check_staged_index, staging, names)
            weights = weights_entry(names)
            info = await self.inspector.inspect(staging.file(weights) if weights else staging.path)
            files = tuple(FileRecord(name=p.wanted.name, size=p.wanted.size, sha256=p.sha256) for p in partials)
            await self.packing.prepare(name, staging.file(weights) if weights else staging.path, staging, files, progress)
            progress(PullEvent(status="writing manifest"))
            manifest = Manifest(
                format=FORMAT,
                name=name.display,
                source=plan.source,
                revision=plan.revision,
                licence=plan.licence,
                created=time.time(),
                mode="stored",
                weights=weights,
                files=files,
            )
            return await in_thread(self.registry.commit, staging, name, manifest, info)


def check_staged_index(staging: Staging, names: list[str]) -> None:
    if INDEX in names:
        check_index(staging.read(INDEX, MAX_INDEX_BYTES), names)


def _copy(path: Path, partial: Partial) -> None:
    partial.restart()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if check_regular(fd).st_size == partial.wanted.size:
            for chunk in read_chunks(FileLayer(), fd, partial.wanted.size):
                partial.write(chunk)
    finally:
        os.close(fd)


def human_bytes(count: int) -> str:
    """1,000-based, as disks are sold: 98.4 MB."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"


def _size(path: Path) -> int:
    """The size of a regular file, -1 when there is none; links are not followed."""
    try:
        found = path.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1
