"""A private folder in which one model is put together, or pip puts a wheel.

Nobody else writes there: its name carries this process and a token. What is in it is the store's own and goes with it, unless the
registry moves the folder to where it is seen. Not here: when that may be (registry.py).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from daemon.store.files import FileLayer, open_root
from daemon.store.owners import new_owner
from daemon.store.paths import StorePaths, check_file_name


class Staging:
    """A model being put together, in a private folder of this process."""

    def __init__(self, layer: FileLayer, paths: StorePaths) -> None:
        self.owner = str(new_owner())
        self.path = paths.staging(self.owner)
        self._layer = layer
        self._paths = paths
        with open_root(layer, paths.root) as root:
            self.parent = root.descend(paths.parts(paths.staging()), create=True)
        try:
            self.folder = self.parent.open(self.owner, create=True)
        except BaseException:
            self.parent.close()
            raise

    def link(self, source: str, source_fd: int | None, name: str) -> None:
        """`name` (may have folders) becomes another name of the file `source`."""
        *above, last = check_file_name(name)
        with self.folder.descend(tuple(above), create=True) as folder:
            self._layer.link(source, last, source_fd, folder.fd)
            folder.sync()

    def create(self, name: str) -> int:
        *above, last = check_file_name(name)
        with self.folder.descend(tuple(above), create=True) as folder:
            return self._layer.create(last, folder.fd)

    def open(self, name: str) -> int:
        *above, last = check_file_name(name)
        with self.folder.descend(tuple(above)) as folder:
            return self._layer.open_file(last, folder.fd, os.O_RDONLY)

    def read(self, name: str, limit_bytes: int) -> bytes:
        *above, last = check_file_name(name)
        with self.folder.descend(tuple(above)) as folder:
            return folder.read(last, limit_bytes)

    def file(self, name: str) -> Path:
        return self._paths.child(self.path, name)

    def discard(self) -> None:
        with suppress(OSError):  # committed, or collected later
            self.parent.remove_tree(self.owner)

    def close(self) -> None:
        self.folder.close()
        self.parent.close()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
        self.close()
