"""Starts the daemon when none answers.

Any number of commands may do this at once: they take turns, and all but the first find a daemon that answers. Whoever else starts
one meets the daemon's own lock, which decides. A start that fails shows what the daemon last wrote to its log.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cavectl.client import Client
from cavectl.output import Console
from daemon.config import Settings
from daemon.interpreter import python_module
from engine.errors import CavectlError

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_LAST_LINES = 12
_HINT = "cavectl daemon logs"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1


def log_path(settings: Settings) -> Path:
    return settings.data_dir / "logs" / "daemon.log"


def daemon_command(*flags: str) -> list[str]:
    return python_module("daemon", *flags)


def answers(client: Client) -> bool:
    """Whether a daemon is there. One that answers with an error is there too."""
    try:
        client.get("/health")
    except CavectlError as error:
        return error.code != "daemon_unreachable"
    return True


def ensure_daemon(client: Client, settings: Settings, console: Console) -> bool:
    """Make sure that a daemon answers; True when this call started a process for it."""
    if answers(client):
        return False
    log = log_path(settings)
    _make_folder(log.parent)
    deadline = time.monotonic() + settings.startup_timeout_s
    with (log.parent / "launch.lock").open("ab") as turn:
        if not _take_turn(turn, client, deadline):
            return False
        before = log.stat().st_size if log.exists() else 0
        failure = _start(client, settings, log, deadline)
    if failure:
        for line in tail(log, _LAST_LINES, skip_bytes=before):
            console.note(f"  {line}")
        raise CavectlError(failure, hint="cavectl daemon logs shows all, cavectl serve runs it here", code="daemon_unreachable")
    return True


def tail(log: Path, lines: int, *, skip_bytes: int = 0) -> list[str]:
    """The last lines of a log, of what came after `skip_bytes`."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(skip_bytes if skip_bytes <= end else 0, end - 512 * lines))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def _take_turn(turn: BinaryIO, client: Client, deadline: float) -> bool:
    """Wait for the right to start a daemon. False when one answers by then: there is nothing left to do."""
    for _ in _attempts(deadline):
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if answers(client):
                return False
        else:
            return not answers(client)
    raise CavectlError("another command has been starting the daemon for too long", hint=_HINT, code="daemon_unreachable")


def _start(client: Client, settings: Settings, log: Path, deadline: float) -> str:
    """Start a process and wait until a daemon answers; what went wrong, or "".

    While another daemon holds the locks, one that starts or drains, it is waited for: it will answer, or go.
    """
    child: subprocess.Popen[bytes] | None = None
    for _ in _attempts(deadline):
        ended = child.poll() if child else None
        if answers(client):
            return ""
        if running_pid(settings) is None:
            if ended is not None:
                return f"the daemon ended with code {ended}"
            child = child or _spawn(log)
        elif ended is not None:
            child = None
    if child:
        child.terminate()
    return f"the daemon did not answer within {settings.startup_timeout_s:g} s"


def running_pid(settings: Settings) -> int | None:
    """The process that last called itself the daemon, if it still runs: it may answer, start, drain or hang."""
    pid = record(settings).get("pid")
    return pid if isinstance(pid, int) and pid > 1 and is_alive(pid) and _is_daemon(pid) else None


def record(settings: Settings) -> dict[str, Any]:
    """What the daemon wrote about itself when it took its locks; {} when there is none. Stale after a kill -9."""
    try:
        found = msgspec.json.decode(settings.daemon_file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended (one that only waits for its parent to notice has)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):
        return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        hint = "set HOME or CAVECTL_DATA_DIR to a folder of yours"
        raise CavectlError(f"cannot write to {folder}: {error.strerror}", hint=hint, code="store_error") from error


def _spawn(log: Path) -> subprocess.Popen[bytes]:
    """A process of its own session, so that neither Ctrl-C nor a closed terminal reaches it.

    It starts in the folder that holds the packages: `-m` puts the working folder first on the import path, and a folder
    named `daemon` where the person happens to stand must not be run instead.
    """
    command = daemon_command("--log-file", str(log))
    with log.open("ab") as output:  # what is written before the log is open, and what an interpreter says when it dies
        nothing = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=PACKAGE_ROOT, stdin=nothing, stdout=output, stderr=output, start_new_session=True)


def _is_daemon(pid: int) -> bool:
    """Whether a process is what it was: its number may have passed to another since (Linux; elsewhere True)."""
    try:
        return b"daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _attempts(deadline: float) -> Iterator[None]:
    """Turns of a polling loop, close together at first."""
    pause = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE_S)
