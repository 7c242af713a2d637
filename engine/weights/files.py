"""Opening and mapping model files.

Owned here: one way to open a file for reading (regular files only, never blocking on a FIFO) and to map it. Not here: what the
bytes mean. Invariant: a mapping covers bytes that the file had when it was opened; a file shorter than its own header says is
refused by the readers before anything is mapped, because pages past the end of a file read as a crash.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from engine.errors import CavectlError, CorruptFile, ModelNotFound, OutOfMemory


class ModelFile:
    """A regular file open for reading. `name` is what messages call it: never a whole path."""

    def __init__(self, path: str | Path) -> None:
        self.name = os.path.basename(path)
        self.fd = _open(path, self.name)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise self.corrupt("not a regular file")
        except BaseException:
            os.close(self.fd)
            raise
        self.size = status.st_size
        self._data: mmap.mmap | None = None

    def corrupt(self, what: str) -> CorruptFile:
        return CorruptFile(f"{self.name}: {what}", hint="download or copy the file again")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`."""
        parts = []
        while length > 0:
            part = os.pread(self.fd, length, offset)
            if not part:
                raise self.corrupt("ends early")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def head(self, length: int) -> mmap.mmap:
        """Maps the first bytes read-only; `length` is between 1 and `size`."""
        return self._map(length, mmap.ACCESS_READ)

    def data(self) -> mmap.mmap:
        """Maps the whole file, once: private and writable, as torch warns about views of read-only memory. Nothing writes to it."""
        if self._data is None:
            self._data = self._map(self.size, mmap.ACCESS_COPY)
        return self._data

    def close(self) -> None:
        """Idempotent. Views that are still held keep their mapping alive until they go."""
        self._data = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self, length: int, access: int) -> mmap.mmap:
        if os.fstat(self.fd).st_size < length:
            raise self.corrupt("was cut while open")
        try:
            return mmap.mmap(self.fd, length, access=access)
        except OSError as error:
            raise OutOfMemory(f"{self.name}: cannot map {length} bytes: {error.strerror}") from error


def _open(path: str | Path, name: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFound(f"there is no file {name}") from error
    except ValueError as error:  # a NUL in the path
        raise ModelNotFound("the path is not a file name") from error
    except OSError as error:
        raise CavectlError(f"cannot open {name}: {error.strerror}", code="store_error") from error
