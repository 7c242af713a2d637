"""Registers models that are on this machine already, and checks registered files against their records.

An imported file is linked, copied, or left in place and recorded with its size and time. Every byte is hashed before the model is
listed. Not here: what a path holds (importer.py), and the folders of models (registry.py).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from daemon.store.files import READ_BYTES, FileLayer, check_regular, open_root, storage_error, storage_errors, write_all
from daemon.store.importer import Found, FoundFile, ImportMode, same_device
from daemon.store.inspector import Inspector
from daemon.store.manifests import FORMAT, FileRecord, Manifest, Mode, PullEvent
from daemon.store.names import ModelName
from daemon.store.packer import Packing
from daemon.store.paths import StorePaths
from daemon.store.progress import Progress, file_reporter
from daemon.store.pull import human_bytes
from daemon.store.registry import Installed, Registry
from daemon.store.selection import weights_entry
from daemon.store.sources import in_thread
from daemon.store.staging import Staging
from engine.errors import CavectlError

_MODES: dict[ImportMode, Mode] = {"link": "linked", "copy": "copied", "in-place": "in-place"}
_STEP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Importer:
    layer: FileLayer
    paths: StorePaths
    registry: Registry
    inspector: Inspector
    packing: Packing
    headroom_bytes: int

    async def take(self, found: Found, name: ModelName, mode: ImportMode, progress: Progress) -> Installed:
        """Registers what `survey` found. CavectlError (model_exists) when the name is taken by other bytes."""
        with storage_errors(f"import {name}"):
            with open_root(self.layer, self.paths.root):
                pass
            chosen = self._mode(found, mode)
            if chosen == "copied":
                self._check_space(found)
            with self.registry.stage() as staging:
                files = [await self._take_file(staging, file, chosen, progress) for file in found.files]
                revision = _revision(files)
                current = self.registry.installed(name)
                if current is not None:
                    return self._same_or_refuse(current, revision, chosen)
                weights = weights_entry(file.name for file in files)
                opened = found.weights if chosen == "in-place" else staging.file(weights) if weights else staging.path
                info = await self.inspector.inspect(opened)
                await self.packing.prepare(name, opened, staging, files, progress)
                progress(PullEvent(status="writing manifest"))
                manifest = Manifest(
                    format=FORMAT,
                    name=name.display,
                    source=str(found.origin),
                    revision=revision,
                    licence="",
                    created=time.time(),
                    mode=chosen,
                    weights=str(found.weights) if chosen == "in-place" else weights,
                    files=tuple(files),
                )
                return await in_thread(self.registry.commit, staging, name, manifest, info)

    def check_present(self, model: Installed) -> None:
        """Every file there, of the size (in place: and the time) on record. Says what to do when not."""
        if model.damaged:
            bad = ", ".join(model.damaged)
            raise CavectlError(f"{model.name} is damaged: {bad}", code="hash_mismatch", hint=_repair(model))
        for file in model.manifest.files:
            try:
                found = os.stat(model.file_path(file))
            except OSError as error:
                message = f"{file.name} of {model.name} is gone: {error.strerror}"
                raise CavectlError(message, code="store_error", hint=_repair(model)) from error
            if found.st_size != file.size or (file.mtime_ns and found.st_mtime_ns != file.mtime_ns):
                raise CavectlError(f"{file.name} of {model.name} has changed", code="hash_mismatch", hint=_repair(model))

    async def verify(self, model: Installed, progress: Progress) -> Installed:
        bad = [file.name for file in model.manifest.files if not await self._matches(model, file, progress)]
        model = await in_thread(self.registry.mark_damaged, model, tuple(bad))
        if bad:
            raise CavectlError(f"{model.name} is damaged: {', '.join(bad)}", code="hash_mismatch", hint=_repair(model))
        now = tuple(_at_its_time(file) for file in model.manifest.files)
        if now != model.manifest.files:
            model = await in_thread(self.registry.renew, model, now)
        self.registry.write_info(model, await self.inspector.inspect(model.weights))
        progress(PullEvent(status="success"))
        return model

    def _mode(self, found: Found, mode: ImportMode) -> Mode:
        near = same_device(found, self.paths.root)
        if mode == "auto":
            return "linked" if found.is_folder and near else "in-place"
        if mode == "link" and not near:
            raise CavectlError(
                "the files are on another file system and cannot be linked",
                code="invalid_request",
                hint="use --mode copy or in-place",
            )
        return _MODES[mode]

    def _check_space(self, found: Found) -> None:
        need = sum(file.size for file in found.files) + self.headroom_bytes
        have = self.layer.free_bytes(self.paths.root)
        if need > have:
            message = f"not enough space on the disk: need {human_bytes(need)}, have {human_bytes(have)}"
            raise CavectlError(message, code="no_space", hint="free some space, or import with --mode in-place")

    async def _take_file(self, staging: Staging, file: FoundFile, mode: Mode, progress: Progress) -> FileRecord:
        doing = "copying" if mode == "copied" else "hashing"
        report = file_reporter(f"{doing} {file.name}", file.name, file.size, progress)
        if mode == "linked":
            staging.link(str(file.path), None, file.name)
        source = staging.open(file.name) if mode == "linked" else os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        target = -1
        try:
            before = check_regular(source)
            target = staging.create(file.name) if mode == "copied" else -1
            size, sha256 = await self._hash(source, target, report)
            if target >= 0:
                await in_thread(self.layer.fsync, target)
            after = os.fstat(source)
        finally:
            os.close(source)
            if target >= 0:
                os.close(target)
        if size != after.st_size or before.st_mtime_ns != after.st_mtime_ns:
            raise CavectlError(
                f"{file.name} changed while it was read", code="store_error", hint="import it when nothing writes to it"
            )
        if mode != "in-place":
            return FileRecord(name=file.name, size=size, sha256=sha256)
        return FileRecord(name=file.name, size=size, sha256=sha256, path=str(file.path), mtime_ns=after.st_mtime_ns)

    async def _hash(self, source: int, target: int, report: Callable[[int], None]) -> tuple[int, str]:
        digest, done = hashlib.sha256(), 0
        while step := await in_thread(self._hash_step, source, target, digest):
            done += step
            report(done)
        return done, digest.hexdigest()

    def _hash_step(self, source: int, target: int, digest: hashlib._Hash) -> int:
        done = 0
        while done < _STEP_BYTES and (chunk := self.layer.read(source, READ_BYTES)):
            digest.update(chunk)
            if target >= 0:
                write_all(self.layer, target, chunk)
            done += len(chunk)
        return done

    def _same_or_refuse(self, current: Installed, revision: str, mode: Mode) -> Installed:
        if current.manifest.revision == revision and current.manifest.mode == mode and not current.damaged:
            return current
        raise CavectlError(
            f"there is a model {current.name} already",
            code="model_exists",
            hint="choose another name, or remove it with cavectl rm",
        )

    async def _matches(self, model: Installed, file: FileRecord, progress: Progress) -> bool:
        report = file_reporter(f"verifying {file.name}", file.name, file.size, progress)
        try:
            fd = os.open(model.file_path(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                return False
            raise storage_error(error, f"read {file.name}") from error
        try:
            check_regular(fd)
            return await self._hash(fd, -1, report) == (file.size, file.sha256)
        except OSError:
            return False
        finally:
            os.close(fd)


def _repair(model: Installed) -> str:
    if model.manifest.mode == "stored":
        return f"cavectl pull {model.name} gets it again"
    return f"cavectl verify {model.name} compares it; or cavectl rm {model.name}, then import it again"


def _at_its_time(file: FileRecord) -> FileRecord:
    """A file in place with the time that it has now."""
    return msgspec.structs.replace(file, mtime_ns=os.stat(file.path).st_mtime_ns) if file.path else file


def _revision(files: list[FileRecord]) -> str:
    """An import's version is its content."""
    lines = "".join(f"{file.sha256}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:12]
