"""The file operations of the store: one thin layer over the system calls, and folders opened by descriptor on top of it.

`FileLayer` has one method per system call that changes or reads the disk, so that a test can count them and make the k-th one
fail or the last one before an exit. `Folder` is an open directory; names below it are single components, never followed when they
are links. Invariant: everything is created with its final mode (0700, 0600) and files only exclusively, under a private name.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine.errors import CavectlError

READ_BYTES = 1 << 20
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileLayer:
    """System calls on names relative to an open directory. Links are never followed."""

    def open_folder(self, name: str, dir_fd: int | None) -> int:
        return os.open(name, _FOLDER_FLAGS, dir_fd=dir_fd)

    def mkdir(self, name: str, dir_fd: int | None) -> None:
        os.mkdir(name, 0o700, dir_fd=dir_fd)

    def create(self, name: str, dir_fd: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=dir_fd)

    def open_file(self, name: str, dir_fd: int, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)

    def read(self, fd: int, size: int) -> bytes:
        return os.read(fd, size)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: str, target: str, source_fd: int, target_fd: int) -> None:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def link(self, source: str, target: str, source_fd: int | None, target_fd: int) -> None:
        os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def names(self, dir_fd: int) -> list[str]:
        return os.listdir(dir_fd)

    def free_bytes(self, path: Path) -> int:
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize


@dataclass(slots=True)
class Folder:
    """An open directory of the store. Use as a context manager."""

    layer: FileLayer
    fd: int

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def open(self, name: str, *, create: bool = False) -> Folder:
        """The directory `name` below this one."""
        if create:
            with suppress(FileExistsError):
                self.layer.mkdir(name, self.fd)
        return Folder(self.layer, self.layer.open_folder(name, self.fd))

    def descend(self, parts: tuple[str, ...], *, create: bool = False) -> Folder:
        """The directory reached through `parts`; this one's twin when there are none."""
        folder = Folder(self.layer, os.dup(self.fd))
        for part in parts:
            try:
                below = folder.open(part, create=create)
            finally:
                folder.close()
            folder = below
        return folder

    def stat(self, name: str) -> os.stat_result | None:
        """lstat, or None when there is no such entry."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A regular file's bytes. Raises OSError (EFBIG) beyond the limit."""
        fd = self.layer.open_file(name, self.fd, os.O_RDONLY)
        try:
            check_regular(fd)
            return b"".join(read_chunks(self.layer, fd, limit_bytes))
        finally:
            os.close(fd)

    def write(self, name: str, data: bytes) -> None:
        """Replaces `name` whole: written under a private name, synced, renamed."""
        private = f".{name}.{secrets.token_hex(8)}"
        fd = self.layer.create(private, self.fd)
        try:
            try:
                write_all(self.layer, fd, data)
                self.layer.fsync(fd)
            finally:
                os.close(fd)
            self.layer.rename(private, name, self.fd, self.fd)
        except BaseException:
            self.discard(private)
            raise

    def discard(self, name: str) -> None:
        """Unlinks a file that may be gone already; on the way out of an error the first error is the one to tell."""
        with suppress(OSError):
            self.layer.unlink(name, self.fd)

    def names(self) -> list[str]:
        return sorted(self.layer.names(self.fd))

    def sync(self) -> None:
        self.layer.fsync(self.fd)

    def remove_tree(self, name: str) -> None:
        """Unlinks a directory that is the store's own, links in it as links, never through them."""
        with self.open(name) as folder:
            for entry in folder.names():
                found = folder.stat(entry)
                if found is not None and stat.S_ISDIR(found.st_mode):
                    folder.remove_tree(entry)
                else:
                    folder.layer.unlink(entry, folder.fd)
        self.layer.rmdir(name, self.fd)


def open_root(layer: FileLayer, root: Path) -> Folder:
    """The store's root, made with its parents when absent. Links above it are the user's choice."""
    for folder in [*reversed(root.parents), root]:
        if not folder.is_dir():
            with suppress(FileExistsError):
                layer.mkdir(str(folder), None)
    return Folder(layer, os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def check_regular(fd: int) -> os.stat_result:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return found


def read_chunks(layer: FileLayer, fd: int, limit_bytes: int) -> Iterator[bytes]:
    """The file from its current position. Raises OSError (EFBIG) when it holds more than the limit."""
    left = limit_bytes
    while chunk := layer.read(fd, READ_BYTES):
        left -= len(chunk)
        if left < 0:
            raise OSError(errno.EFBIG, "file too large")
        yield chunk


def write_all(layer: FileLayer, fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[layer.write(fd, view) :]


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turns a failed file operation into the error that a person reads; `doing` completes "cannot ..."."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing) from error


def storage_error(error: OSError, doing: str) -> CavectlError:
    if error.errno in _FULL:
        return CavectlError(f"no space left on the disk: cannot {doing}", code="no_space", hint="free some space and pull again")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CavectlError(
            f"cannot {doing}: too many open files", code="store_error", hint="raise the limit (ulimit -n) and try again"
        )
    return CavectlError(f"cannot {doing}: {error.strerror or error}", code="store_error")


def read_regular(path: Path, limit_bytes: int, *, cut: bool = False) -> bytes:
    """A regular file outside the store, up to the limit; OSError (EFBIG) when it holds more, unless `cut`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(fd)
        if cut:
            return os.read(fd, limit_bytes)
        return b"".join(read_chunks(FileLayer(), fd, limit_bytes))
    finally:
        os.close(fd)
