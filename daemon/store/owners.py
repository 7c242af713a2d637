"""Who holds a private name in the store: a process, told from a later one with the same pid by its start time.

Owns the spelling `<pid>-<start>-<token>` and the question whether such an owner still lives. Two processes never share a token,
so a name that carries one is exclusive without any lock; locks (flock) are a second opinion for pids of other containers.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from dataclasses import dataclass

_SPELLING = re.compile(r"([0-9]{1,10})-([0-9]{1,12})-([0-9a-f]{16})")
_CLOCK_SLACK_S = 5  # a start time is derived from the wall clock, which may be stepped


@dataclass(frozen=True, slots=True)
class Owner:
    pid: int
    started: int
    token: str

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}-{self.token}"

    @property
    def alive(self) -> bool:
        started = _start_time(self.pid)
        return started is not None and abs(started - self.started) <= _CLOCK_SLACK_S


def new_owner() -> Owner:
    """This process, with a token of its own for every call."""
    pid = os.getpid()
    return Owner(pid, _start_time(pid) or 0, secrets.token_hex(8))


def parse_owner(text: str) -> Owner | None:
    match = _SPELLING.fullmatch(text)
    return Owner(int(match[1]), int(match[2]), match[3]) if match else None


def try_lock(fd: int) -> bool:
    """Whether nobody else holds the file open under its lock; held until the descriptor is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the owner's name decides alone
        return True
    return True


def _start_time(pid: int) -> int | None:
    import psutil

    try:
        return int(psutil.Process(pid).create_time())
    except psutil.AccessDenied:
        return 0
    except (psutil.Error, OverflowError, ValueError):
        return None
