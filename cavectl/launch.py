"""Starts the daemon when none answers.

Any number of commands may do this at once: each starts a process, the daemon's own lock lets one of them live, and every command
connects to whichever won. A start that fails shows what the daemon last wrote to its log.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cavectl.client import Client
from cavectl.output import Console
from daemon.config import Settings
from engine.errors import CavectlError

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_LAST_LINES = 12
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1


def log_path(settings: Settings) -> Path:
    return settings.data_dir / "logs" / "daemon.log"


def daemon_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "daemon", *flags]


def answers(client: Client) -> bool:
    """Whether a daemon is there. One that answers with an error is there too."""
    try:
        client.get("/health")
    except CavectlError as error:
        return error.code != "daemon_unreachable"
    return True


def ensure_daemon(client: Client, settings: Settings, console: Console, timeout_s: float) -> bool:
    """Make sure that a daemon answers; True when this call started a process for it."""
    if answers(client):
        return False
    log = log_path(settings)
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = log.stat().st_size if log.exists() else 0
    child = _spawn(log)
    if not _wait(lambda: answers(client), child, timeout_s):
        for line in tail(log, _LAST_LINES, skip_bytes=before):
            console.note(f"  {line}")
        code = child.poll()
        happened = f"did not answer within {timeout_s:g} s" if code is None else f"ended with code {code}"
        raise CavectlError(
            f"the daemon {happened}", hint="cavectl daemon logs shows all, cavectl serve runs it here", code="daemon_unreachable"
        )
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


def _spawn(log: Path) -> subprocess.Popen[bytes]:
    """A process of its own session, so that neither Ctrl-C nor a closed terminal reaches it.

    It starts in the folder that holds the packages: `-m` puts the working folder first on the import path, and a folder
    named `daemon` where the person happens to stand must not be run instead.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            daemon_command(), cwd=PACKAGE_ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _wait(ready: Callable[[], bool], child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Poll, often at first. A child that ended well lost the race to another: the winner is still worth waiting for."""
    deadline = time.monotonic() + timeout_s
    pause = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        failed = child.poll() not in (None, 0)
        if ready():
            return True
        if failed:
            return False
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE_S)
    return False
