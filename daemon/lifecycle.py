"""The life of one daemon on a machine: its locks, its sockets and the file that says where it is.

Who may run is decided by flock, never by a pid: one daemon per socket and one per data folder. A socket file is replaced only under
the lock, and only if it is a socket. Everything made here is private (folders 0700, files 0600, made so and not changed later: the
process runs under umask 077) and is removed by the daemon that made it. Loads no event loop and nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from daemon.config import NO_PORT, Settings
from daemon.security import is_loopback
from engine.errors import CavectlError, InvalidRequest

BACKLOG = 1024


@dataclass(slots=True)
class Lock:
    """An exclusive flock on a file, released when the process ends in whatever way. The file's text is for people."""

    path: Path
    fd: int = field(default=-1, init=False)

    def acquire(self, about: str) -> None:
        """Raises CavectlError (daemon_running) with what the holder wrote about itself."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(fd, 4096).decode(errors="replace").strip()
                os.close(fd)
                raise _running(holder) from None
            if _is_same_file(fd, self.path):
                break
            os.close(fd)  # its last holder removed it between our open and our lock
        os.ftruncate(fd, 0)
        os.write(fd, about.encode())
        self.fd = fd

    def release(self) -> None:
        """Removes the file while it is still locked, so that nobody can lock a name that is about to go."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self.fd)
            self.fd = -1


class Presence:
    """A running daemon as the file system shows it: locks, listening sockets, daemon.json. A context manager."""

    def __init__(self, settings: Settings, version: str) -> None:
        self.settings, self.version = settings, version
        self.locks: list[Lock] = []
        self.unix: socket.socket | None = None
        self.tcp: socket.socket | None = None
        self._socket_id: tuple[int, int] | None = None

    def __enter__(self) -> Presence:
        try:
            self._establish()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    @property
    def port(self) -> int:
        """The TCP port that is listened on, or NO_PORT."""
        return NO_PORT if self.tcp is None else self.tcp.getsockname()[1]

    def _establish(self) -> None:
        settings = self.settings
        check_exposure(settings)
        about = f"pid {os.getpid()} on {settings.socket}"
        for folder in (settings.data_dir, settings.runtime_dir, settings.socket.parent):
            make_private_dir(folder)
        for path in (settings.socket.with_name(settings.socket.name + ".lock"), settings.data_dir / "daemon.lock"):
            lock = Lock(path)
            lock.acquire(about)
            self.locks.append(lock)
        self.tcp = _listen_tcp(settings.host, settings.port) if settings.port != NO_PORT else None
        self.unix = _listen_unix(settings.socket)
        self._socket_id = _identity(settings.socket)
        self._write_daemon_file()

    def _write_daemon_file(self) -> None:
        shown = {
            "pid": os.getpid(),
            "socket": str(self.settings.socket),
            "host": self.settings.host if self.tcp else None,
            "port": self.port if self.tcp else None,
            "version": self.version,
            "started_at": time.time(),
        }
        path = self.settings.daemon_file
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(shown) + "\n", encoding="utf-8")
        temporary.replace(path)

    def remove(self) -> None:
        """Closes and removes what this daemon made, and nothing that another put in its place. Safe to call twice."""
        for listener in (self.tcp, self.unix):
            if listener is not None:
                listener.close()
        if self._socket_id is not None:
            with contextlib.suppress(OSError):
                if _identity(self.settings.socket) == self._socket_id:
                    self.settings.socket.unlink()
            with contextlib.suppress(OSError, ValueError):
                if json.loads(self.settings.daemon_file.read_bytes())["pid"] == os.getpid():
                    self.settings.daemon_file.unlink()
            self._socket_id = None
        for lock in reversed(self.locks):
            lock.release()
        self.locks.clear()


def check_exposure(settings: Settings) -> None:
    """Refuses to be reachable from other machines without a key (S15)."""
    if settings.port != NO_PORT and not settings.api_key and not is_loopback(settings.host):
        raise InvalidRequest(
            f"listening on {settings.host} lets other machines in, and there is no API key",
            hint="set CAVECTL_API_KEY, or listen on 127.0.0.1",
        )


def make_private_dir(path: Path) -> None:
    """Makes `path`, mode 0700, with its parents; or checks that nobody else can put files into the one that is there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat() if str(path).startswith("/tmp/") else path.stat()  # noqa: S108
    except OSError as error:
        raise CavectlError(f"cannot make the folder {path}: {_reason(error)}", code="store_error", hint=_DIR_HINT) from error
    if not stat.S_ISDIR(info.st_mode):
        raise CavectlError(f"{path} is not a folder", code="store_error", hint=_DIR_HINT)
    if info.st_uid not in {os.getuid(), 0}:
        raise CavectlError(f"the folder {path} belongs to another user", code="store_error", hint=_DIR_HINT)
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise CavectlError(f"other users can write into {path}", code="store_error", hint=f"chmod go-w {path}")


_DIR_HINT = "CAVECTL_DATA_DIR and CAVECTL_RUNTIME_DIR say where the daemon keeps its files"


def _listen_unix(path: Path) -> socket.socket:
    """A listening socket at `path`, mode 0600. Called under the lock: whatever socket is there is left over."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise CavectlError(f"{path} exists and is not a socket", code="store_error", hint="move it away")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)  # a socket is made with all bits that the mask leaves
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CavectlError(f"cannot listen on {path}: {_reason(error)}", code="store_error") from error
    listener.setblocking(False)
    return listener


def _listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket on the first address of `host`."""
    where = f"{host}:{port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {where}: {_reason(error)}") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            hint = f"another program uses port {port}; give another one with --port or CAVECTL_PORT, or 'off' for none"
            raise CavectlError(f"port {port} on {host} is in use", code="daemon_running", hint=hint) from error
        raise InvalidRequest(f"cannot listen on {where}: {_reason(error)}") from error
    listener.setblocking(False)
    return listener


def _running(holder: str) -> CavectlError:
    who = f" ({holder})" if holder else ""
    return CavectlError(f"a daemon is already running{who}", code="daemon_running", hint="cavectl daemon status")


def _identity(path: Path) -> tuple[int, int]:
    info = path.lstat()
    return info.st_dev, info.st_ino


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
