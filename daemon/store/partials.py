"""Files on their way into the store: private, resumable, hashed while they are written.

A partial is a folder `partial/<key>` with `data` and `meta.json`; while a process works on it the folder's name carries the
owner. The key is made of the expected hash, so whatever source or name a file comes by, its bytes go on where they stopped.
Invariant: only one process writes a `data` file, and one that something else links to (st_nlink > 1) is never written to. Not
here: where bytes come from (fetch.py, wheel.py), and the move into a model's folder (registry.py).
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from daemon.store.files import FileLayer, Folder, check_regular, open_root, write_all
from daemon.store.names import ModelName
from daemon.store.owners import Owner, new_owner, parse_owner, try_lock
from daemon.store.paths import StorePaths
from engine.errors import CavectlError

DATA = "data"
META = "meta.json"
_MAX_META_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Checksum:
    """`git` is a blob id: sha1 of a header with the size, then the content."""

    kind: Literal["sha256", "git"]
    value: str


@dataclass(frozen=True, slots=True)
class WantedFile:
    name: str
    size: int
    check: Checksum

    @property
    def key(self) -> str:
        identity = f"{self.check.kind}:{self.check.value}:{self.size}"
        return "sha256:" + hashlib.sha256(identity.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """For the wire: the content's sha256 where the source gives it, else ""."""
        return f"sha256:{self.check.value}" if self.check.kind == "sha256" else ""


class PartialMeta(msgspec.Struct, frozen=True, kw_only=True):
    """For whom a partial was begun, and the validator that its server gave."""

    model: str
    file: str
    etag: str = ""


class Digester:
    """Our own sha256 and the hash that the source gave, over one pass."""

    def __init__(self, wanted: WantedFile) -> None:
        self._wanted = wanted
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % wanted.size, usedforsecurity=False) if wanted.check.kind == "git" else None

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def matches(self) -> bool:
        found = self.sha256 if self._git is None else self._git.hexdigest()
        return found == self._wanted.check.value


def hash_mismatch(name: str, why: str = "its hash is not the one its source gives") -> CavectlError:
    return CavectlError(
        f"{name} is not what it should be: {why}", code="hash_mismatch", hint="pull again; only this file is fetched anew"
    )


class Partial:
    """One claimed partial. Not for two threads at once; `release`, `drop` or the process's end gives it up."""

    def __init__(self, layer: FileLayer, parent: Folder, folder_name: str, wanted: WantedFile, meta: PartialMeta) -> None:
        self._layer = layer
        self._parent = parent
        self._name = folder_name
        self._folder = parent.open(folder_name)
        self._fd = -1
        self.wanted = wanted
        self.meta = meta
        self.resumed = False
        self.locked = not try_lock(self._folder.fd)  # by a process that is not seen from here
        self.size = 0  # bytes hashed and, but for the page cache, on disk
        self._digester = Digester(wanted)

    @property
    def complete(self) -> bool:
        return self.size == self.wanted.size

    @property
    def matches(self) -> bool:
        return self.complete and self._digester.matches

    @property
    def sha256(self) -> str:
        return self._digester.sha256

    @property
    def folder_fd(self) -> int:
        """The folder that holds DATA, for linking it elsewhere."""
        return self._folder.fd

    def adopt_existing(self) -> bool:
        """Opens what an earlier process left; False when there is nothing usable."""
        try:
            self._fd = self._layer.open_file(DATA, self._folder.fd, os.O_RDWR)
            found = check_regular(self._fd)
        except OSError:
            self._close_data()
            return False
        whole = found.st_size == self.wanted.size
        self.resumed = whole or (found.st_size < self.wanted.size and found.st_nlink == 1)
        return self.resumed

    def hash_more(self, step_bytes: int) -> bool:
        """Hashes the next bytes of what was there already; False when all are."""
        chunk = self._layer.read(self._fd, min(step_bytes, self.wanted.size - self.size + 1))
        self._digester.update(chunk)
        self.size += len(chunk)
        return bool(chunk) and self.size <= self.wanted.size

    def restart(self) -> None:
        """An empty file under a new inode: the old one may be linked elsewhere, or open in another process."""
        self._close_data()
        if self._folder.stat(DATA) is not None:
            self._layer.unlink(DATA, self._folder.fd)
        self._fd = self._layer.create(DATA, self._folder.fd)
        self.resumed = False
        self._reset_hash()

    def adopt_link(self, path: Path) -> bool:
        """Makes the file at `path` the data by a hard link, unhashed yet. False where the file system refuses."""
        self._close_data()
        self._folder.discard(DATA)
        try:
            self._layer.link(str(path), DATA, None, self._folder.fd)
        except OSError:
            return False
        return self.adopt_existing()

    def write(self, data: bytes) -> None:
        if self.size + len(data) > self.wanted.size:
            raise hash_mismatch(self.wanted.name, f"more than its {self.wanted.size} bytes came")
        write_all(self._layer, self._fd, data)
        self._digester.update(data)
        self.size += len(data)

    def note(self, etag: str) -> None:
        """Keeps the server's validator for a later resume."""
        if etag != self.meta.etag:
            self.meta = msgspec.structs.replace(self.meta, etag=etag)
            self._folder.write(META, msgspec.json.encode(self.meta))

    def finish(self) -> None:
        """Checks size and hash and brings the bytes to the disk. A wrong file is dropped, and never seen again."""
        if os.fstat(self._fd).st_size != self.wanted.size or not self.matches:
            why = "its hash is not the one its source gives" if self.complete else f"{self.size} of {self.wanted.size} bytes came"
            self.restart()
            raise hash_mismatch(self.wanted.name, why)
        self._layer.fsync(self._fd)

    def release(self) -> None:
        """Gives the partial up for anybody to go on with; one without a byte is not worth keeping."""
        if self._fd >= 0 and os.fstat(self._fd).st_size == 0:
            self.drop()
            return
        unowned = self._name.partition("~")[0]
        with suppress(OSError):  # another one of the same key was given up meanwhile; theirs stays, ours goes by age
            self._layer.rename(self._name, unowned, self._parent.fd, self._parent.fd)
        self.close()

    def drop(self) -> None:
        with suppress(OSError):  # what is left is collected by age
            self._parent.remove_tree(self._name)
        self.close()

    def close(self) -> None:
        self._close_data()
        self._folder.close()
        self._parent.close()

    def _close_data(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._reset_hash()

    def _reset_hash(self) -> None:
        self.size = 0
        self._digester = Digester(self.wanted)


class Partials:
    """The folder of all partials: claiming one, and collecting those that nobody came back for."""

    def __init__(self, layer: FileLayer, paths: StorePaths) -> None:
        self._layer = layer
        self._paths = paths

    def claim(self, wanted: WantedFile, model: ModelName) -> Partial:
        """The largest abandoned partial of this content, or a new one."""
        with self._open() as folder:
            for entry in self._abandoned(folder, wanted.key):
                partial = self._take(folder, entry, wanted, model)
                if partial is not None:
                    return partial
            return self._begin(folder, wanted, model)

    def partial_bytes(self, wanted: WantedFile) -> int:
        """How much of a file is here already, unhashed; for the estimate of the space that a pull needs."""
        with self._open() as folder:
            return max((_data_bytes(folder, entry) for entry in self._abandoned(folder, wanted.key)), default=0)

    def collect(self, *, older_than_s: float, model: ModelName | None = None) -> int:
        """Drops abandoned partials (of one model, or of all) by age; gives the bytes freed. Live owners are left alone."""
        freed = 0
        with self._open() as folder:
            for entry in folder.names():
                if _is_abandoned(entry) and (model is None or self._belongs(folder, entry, model)):
                    freed += self._collect_one(folder, entry, older_than_s)
        return freed

    def _open(self) -> Folder:
        with open_root(self._layer, self._paths.root) as root:
            return root.descend(self._paths.parts(self._paths.partials()), create=True)

    def _abandoned(self, folder: Folder, key: str) -> list[str]:
        stem = self._paths.partial(key).name
        entries = [name for name in folder.names() if name.partition("~")[0] == stem and _is_abandoned(name)]
        return sorted(entries, key=lambda name: -_data_bytes(folder, name))

    def _take(self, folder: Folder, entry: str, wanted: WantedFile, model: ModelName) -> Partial | None:
        mine = self._paths.partial(wanted.key, str(new_owner())).name
        try:
            self._layer.rename(entry, mine, folder.fd, folder.fd)
        except FileNotFoundError:  # somebody was quicker
            return None
        meta = _read_meta(folder, mine) or PartialMeta(model=model.display, file=wanted.name)
        partial = Partial(self._layer, folder.descend(()), mine, wanted, meta)
        if partial.locked:  # alive in another container after all
            partial.release()
        elif partial.adopt_existing():
            return partial
        else:
            partial.drop()
        return None

    def _begin(self, folder: Folder, wanted: WantedFile, model: ModelName) -> Partial:
        mine = self._paths.partial(wanted.key, str(new_owner())).name
        self._layer.mkdir(mine, folder.fd)
        meta = PartialMeta(model=model.display, file=wanted.name)
        partial = Partial(self._layer, folder.descend(()), mine, wanted, meta)
        try:
            partial.restart()
            with folder.open(mine) as inner:
                inner.write(META, msgspec.json.encode(meta))
        except BaseException:
            partial.drop()
            raise
        return partial

    def _belongs(self, folder: Folder, entry: str, model: ModelName) -> bool:
        meta = _read_meta(folder, entry)
        return meta is not None and meta.model.casefold() == model.display.casefold()

    def _collect_one(self, folder: Folder, entry: str, older_than_s: float) -> int:
        size, touched = _data_bytes(folder, entry), _touched(folder, entry)
        if time.time() - touched < older_than_s and not _is_worthless(folder, entry):
            return 0
        mine = f"{entry.partition('~')[0]}~{new_owner()}"
        try:
            with folder.open(entry) as inner:
                if not try_lock(inner.fd):
                    return 0
                self._layer.rename(entry, mine, folder.fd, folder.fd)  # from here on nobody can resume it
            folder.remove_tree(mine)
        except OSError:
            return 0
        return size


def _is_abandoned(entry: str) -> bool:
    _, owned, owner_text = entry.partition("~")
    owner: Owner | None = parse_owner(owner_text)
    return not owned or owner is None or not owner.alive


def _data_bytes(folder: Folder, entry: str) -> int:
    try:
        with folder.open(entry) as inner:
            found = inner.stat(DATA)
    except OSError:
        return 0
    return found.st_size if found else 0


def _is_worthless(folder: Folder, entry: str) -> bool:
    """No bytes, or bytes that a model or the cache they came from has too."""
    try:
        with folder.open(entry) as inner:
            found = inner.stat(DATA)
    except OSError:
        return False
    return found is None or found.st_size == 0 or found.st_nlink > 1


def _touched(folder: Folder, entry: str) -> float:
    """When anything in it last changed."""
    try:
        with folder.open(entry) as inner:
            stats = [inner.stat(name) for name in (DATA, META)]
    except OSError:
        return time.time()
    own = folder.stat(entry)
    return max((found.st_mtime for found in [*stats, own] if found), default=0.0)


def _read_meta(folder: Folder, entry: str) -> PartialMeta | None:
    try:
        with folder.open(entry) as inner:
            return msgspec.json.decode(inner.read(META, _MAX_META_BYTES), type=PartialMeta)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
