"""The models on disk: putting one together, making it visible in one step, finding, listing and removing.

A model is assembled in a private folder below `staging/`, its manifest last, and becomes visible by one rename of that folder, so
it is absent or complete whatever process dies when. Leaving is one rename too; then only files that the manifest names are
unlinked, never through links; what the store did not create goes to `kept/`. Not here: where bytes come from (pull.py,
importer.py). Reads trust nothing: a manifest that cannot be read costs its model alone.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from daemon.store.files import FileLayer, Folder, open_root, storage_error, storage_errors
from daemon.store.manifests import (
    MAX_INFO_BYTES,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    ModelRecord,
    decode_info,
    decode_manifest,
    encode_manifest,
    manifest_digest,
)
from daemon.store.names import ModelName
from daemon.store.owners import new_owner, parse_owner
from daemon.store.paths import DAMAGED, INFO, MANIFEST, StorePaths, below, check_file_name, is_packed, tag_prefix
from daemon.store.staging import Staging
from engine.errors import CavectlError, CorruptFile
from engine.types import ModelInfo

_LOG = logging.getLogger("cavectl.store")
_STAGING_GRACE_S = 3600  # an owner in another container looks dead from here
_MAX_SWAPS = 16
_RECENT = 4


@dataclass(frozen=True, slots=True)
class Installed:
    """A model folder whose manifest was read. `folder` is its path in the store."""

    folder: Path
    name: ModelName
    manifest: Manifest
    digest: str
    damaged: tuple[str, ...]

    @property
    def weights(self) -> Path:
        recorded = self.manifest.weights
        if self.manifest.mode == "in-place":
            return Path(recorded)
        return below(self.folder, recorded) if recorded else self.folder

    def file_path(self, file: FileRecord) -> Path:
        return Path(file.path) if file.path else below(self.folder, file.name)


class Registry:
    """All model folders below one root."""

    def __init__(self, layer: FileLayer, paths: StorePaths) -> None:
        self._layer = layer
        self._paths = paths
        self._recent: dict[tuple[str, int, int, int] | None, ModelInfo] = {}
        self._told: set[tuple[str, str]] = set()

    # --- reading

    def installed(self, name: ModelName) -> Installed | None:
        """The newest folder of this name. CorruptFile when there is one whose manifest cannot be read, and no other."""
        found, broken = [], None
        for folder in self._model_folders(self._paths.variants(name)):
            if not folder.name.startswith(tag_prefix(name)):
                continue
            try:
                model = self._read(folder)
            except CavectlError as error:
                broken = error
                continue
            if model.name.key == name.key:
                found.append(model)
        if not found and broken is not None:
            hint = f"cavectl pull {name} repairs it; files that hash right are not fetched again"
            raise CavectlError(f"{name}: {broken.message}", hint=hint, code=broken.code)
        return max(found, key=lambda model: (model.manifest.created, model.digest), default=None)

    def all(self) -> list[Installed]:
        """Every readable model, one per name, by name. Unreadable ones are named in the log."""
        newest: dict[tuple[str, ...], Installed] = {}
        for folder in self._all_folders():
            try:
                model = self._read(folder)
            except CavectlError as error:
                self._tell(folder, error)
                continue
            other = newest.get(model.name.key)
            if other is None or other.manifest.created < model.manifest.created:
                newest[model.name.key] = model
        return sorted(newest.values(), key=lambda model: model.name.display)

    def info(self, model: Installed, *, vocabulary: bool) -> ModelInfo:
        """The facts; those with a vocabulary, which take some 25 ms to read, are remembered for the last few models."""
        with storage_errors(f"read {model.name}"), self._open(model.folder) as folder:
            try:
                found = folder.stat(INFO)
                key = (str(model.folder), found.st_ino, found.st_mtime_ns, found.st_size) if found and vocabulary else None
                if key in self._recent:
                    return self._recent[key]
                data = folder.read(INFO, MAX_INFO_BYTES)
            except FileNotFoundError as error:
                hint = f"cavectl verify {model.name} writes them anew"
                raise CorruptFile(f"{model.name}: the model facts are missing", hint=hint) from error
        info = decode_info(data, vocabulary=vocabulary)
        if key is not None:
            self._recent = {**dict(list(self._recent.items())[1 - _RECENT :]), key: info}  # one assignment: readers may be threads
        return info

    def record(self, model: Installed, *, vocabulary: bool) -> ModelRecord:
        manifest = model.manifest
        return ModelRecord(
            name=manifest.name,
            digest=model.digest,
            root=model.folder,
            weights=model.weights,
            files=manifest.files,
            source=manifest.source,
            revision=manifest.revision,
            licence=manifest.licence,
            modified_at=manifest.created,
            info=self.info(model, vocabulary=vocabulary),
            damaged=model.damaged,
        )

    def records(self) -> list[ModelRecord]:
        """All models, without vocabularies; one whose facts cannot be read is left out and logged."""
        records = []
        for model in self.all():
            try:
                records.append(self.record(model, vocabulary=False))
            except CavectlError as error:
                self._tell(model.folder, error)
        return records

    def copies(self, size: int) -> Iterator[tuple[FileRecord, Path]]:
        """Files of that size that a model owns here; the hash is what their manifest says, to be checked by the taker."""
        for model in self.all():
            for file in model.manifest.files:
                if file.size == size and not file.path:
                    yield file, model.file_path(file)

    # --- writing

    def stage(self) -> Staging:
        return Staging(self._layer, self._paths)

    def commit(self, staging: Staging, name: ModelName, manifest: Manifest, info: ModelInfo) -> Installed:
        """Makes the staged model visible in one rename; a whole one that is there already stays, anything else there goes.

        Older revisions of the name go too.
        """
        target = self._paths.model(name, manifest.revision)
        data = encode_manifest(manifest)
        with storage_errors(f"store {name}"):
            staging.folder.write(INFO, msgspec.msgpack.encode(info))
            staging.folder.write(MANIFEST, data)
            staging.folder.sync()
            with self._open(target.parent, create=True) as variants:
                installed = self._swap_in(staging, variants, Installed(target, name, manifest, manifest_digest(data), ()))
                variants.sync()
            self._retire_others(name, target.name)
        return installed

    def remove(self, name: ModelName) -> bool:
        """Hides the model at once, then unlinks what the store created. False when there is none.

        A folder whose manifest cannot be read goes too, as a whole to `kept/`: nothing says which of its files are the store's.
        """
        removed = False
        with storage_errors(f"remove {name}"):
            for folder in self._own_folders(name):
                with self._open(folder.parent) as variants:
                    self._retire(variants, folder.name)
                removed = True
        self._prune(name)
        return removed

    def mark_damaged(self, model: Installed, files: tuple[str, ...]) -> Installed:
        """Remembers which files are bad (none: forgets the mark)."""
        with storage_errors(f"mark {model.name}"), self._open(model.folder) as folder:
            if files:
                folder.write(DAMAGED, msgspec.json.encode(files))
            else:
                folder.discard(DAMAGED)
        return replace(model, damaged=files)

    def renew(self, model: Installed, files: tuple[FileRecord, ...]) -> Installed:
        """Records files that proved to be the same at another time."""
        manifest = msgspec.structs.replace(model.manifest, files=files)
        data = encode_manifest(manifest)
        with storage_errors(f"store {model.name}"), self._open(model.folder) as folder:
            folder.write(MANIFEST, data)
        return replace(model, manifest=manifest, digest=manifest_digest(data))

    def write_info(self, model: Installed, info: ModelInfo) -> None:
        with storage_errors(f"store {model.name}"), self._open(model.folder) as folder:
            folder.write(INFO, msgspec.msgpack.encode(info))

    def collect(self) -> None:
        """Finishes what a killed process left: half-removed models, and staging folders whose owner is gone."""
        with open_root(self._layer, self._paths.root) as root:
            if root.stat("staging") is not None:
                with root.open("staging") as staging:
                    self._collect_staging(staging)
            if root.stat("removed") is not None:
                with root.open("removed") as removed:
                    for entry in removed.names():
                        self._discard(root, removed, entry)

    # --- inside

    def _tell(self, folder: Path, error: CavectlError) -> None:
        """One log line per broken folder and reason, however often it is listed."""
        if (str(folder), error.message) not in self._told:
            self._told.add((str(folder), error.message))
            _LOG.warning("model folder %s: %s", folder.name, error.message)

    def _open(self, path: Path, *, create: bool = False) -> Folder:
        with open_root(self._layer, self._paths.root) as root:
            return root.descend(self._paths.parts(path), create=create)

    def _all_folders(self) -> Iterator[Path]:
        for owner in _subfolders(self._paths.models()):
            for variants in _subfolders(owner):
                yield from self._model_folders(variants)

    def _model_folders(self, variants: Path) -> Iterator[Path]:
        for folder in _subfolders(variants):
            if os.path.lexists(below(folder, MANIFEST)):
                yield folder

    def _own_folders(self, name: ModelName) -> list[Path]:
        """The folders of this name, readable or not."""
        return [
            folder
            for folder in self._model_folders(self._paths.variants(name))
            if folder.name.startswith(tag_prefix(name)) and self._may_be(folder, name)
        ]

    def _may_be(self, folder: Path, name: ModelName) -> bool:
        try:
            return self._read(folder).name.key == name.key
        except CavectlError:
            return True

    def _read(self, path: Path) -> Installed:
        try:
            with self._open(path) as folder:
                data = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
                damaged = self._read_damaged(folder)
        except OSError as error:
            raise storage_error(error, "read the manifest") from error
        manifest, name = decode_manifest(data)
        if self._paths.model(name, manifest.revision) != path:
            raise CorruptFile("the manifest is of another folder")
        return Installed(path, name, manifest, manifest_digest(data), damaged)

    def _read_damaged(self, folder: Folder) -> tuple[str, ...]:
        if folder.stat(DAMAGED) is None:
            return ()
        try:
            return msgspec.json.decode(folder.read(DAMAGED, MAX_MANIFEST_BYTES), type=tuple[str, ...])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return ("unknown",)  # the mark counts, whatever became of its text

    def _swap_in(self, staging: Staging, variants: Folder, made: Installed) -> Installed:
        for _ in range(_MAX_SWAPS):
            present = self._whole(made.folder)
            if (
                present is not None
                and present.manifest.files == made.manifest.files
                and present.manifest.mode == made.manifest.mode
            ):
                return present
            try:
                self._layer.rename(staging.owner, made.folder.name, staging.parent.fd, variants.fd)
                return made
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            self._retire(variants, made.folder.name)
        raise OSError(errno.EBUSY, "the model's folder keeps changing")

    def _whole(self, path: Path) -> Installed | None:
        """The model in that folder, if its manifest can be read and every file has its size."""
        try:
            model = self._read(path)
            sizes = [os.lstat(model.file_path(file)).st_size for file in model.manifest.files]
        except (OSError, CavectlError):
            return None
        return model if not model.damaged and sizes == [file.size for file in model.manifest.files] else None

    def _retire_others(self, name: ModelName, keep: str) -> None:
        for folder in list(self._model_folders(self._paths.variants(name))):
            if folder.name == keep or not folder.name.startswith(tag_prefix(name)):
                continue
            try:
                same = self._read(folder).name.key == name.key
            except CavectlError:
                continue
            if same:
                with self._open(folder.parent) as variants:
                    self._retire(variants, folder.name)

    def _retire(self, variants: Folder, name: str) -> None:
        token = str(new_owner())
        with open_root(self._layer, self._paths.root) as root, root.open("removed", create=True) as removed:
            try:
                self._layer.rename(name, token, variants.fd, removed.fd)
            except FileNotFoundError:  # another process did
                return
            self._discard(root, removed, token)

    def _discard(self, root: Folder, removed: Folder, token: str) -> None:
        """Unlinks what the folder's manifest names, the manifest last; anything else is kept aside."""
        try:
            with removed.open(token) as folder:
                manifest = None
                if folder.stat(MANIFEST) is not None:  # else all that was ours is gone already
                    manifest, _ = decode_manifest(folder.read(MANIFEST, MAX_MANIFEST_BYTES))
                if manifest is not None:
                    _unlink_files(folder, manifest)
            self._layer.rmdir(token, removed.fd)
        except CorruptFile:
            self._keep(root, removed, token)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self._keep(root, removed, token)
            else:  # the next collection tries again
                _LOG.warning("cannot clear a removed model: %s", error.strerror)

    def _keep(self, root: Folder, removed: Folder, token: str) -> None:
        try:
            with root.open("kept", create=True) as kept:
                self._layer.rename(token, token, removed.fd, kept.fd)
        except OSError as error:
            _LOG.warning("cannot keep what is not ours of a removed model: %s", error.strerror)

    def _collect_staging(self, staging: Folder) -> None:
        for entry in staging.names():
            owner, found = parse_owner(entry), staging.stat(entry)
            if owner is None or owner.alive or found is None or time.time() - found.st_mtime < _STAGING_GRACE_S:
                continue
            try:
                staging.remove_tree(entry)
            except OSError as error:
                _LOG.warning("cannot clear a staging folder: %s", error.strerror)

    def _prune(self, name: ModelName) -> None:
        """Takes away the name's folders when nothing is left in them."""
        variants = self._paths.variants(name)
        for folder in (variants, variants.parent):
            try:
                folder.rmdir()
            except OSError:
                return


def _subfolders(path: Path) -> list[Path]:
    """Real directories below `path`, links left out; none when it does not exist."""
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unlink_files(folder: Folder, manifest: Manifest) -> None:
    for file in manifest.files:
        if not file.path:
            _unlink_regular(folder, check_file_name(file.name))
    for name in (*filter(is_packed, folder.names()), INFO, DAMAGED, MANIFEST):
        _unlink_regular(folder, (name,))


def _unlink_regular(folder: Folder, parts: tuple[str, ...]) -> None:
    """One file, if it is one, and the folders above it that it leaves empty."""
    *above, last = parts
    try:
        with folder.descend(tuple(above)) as inner:
            found = inner.stat(last)
            if found is not None and stat.S_ISREG(found.st_mode):
                inner.layer.unlink(last, inner.fd)
    except FileNotFoundError:
        return
    for depth in range(len(above), 0, -1):
        with folder.descend(tuple(above[: depth - 1])) as upper:
            try:
                upper.layer.rmdir(above[depth - 1], upper.fd)
            except OSError:
                return
