"""The system calls of the engine that differ between Linux and macOS, and what the machine has: cores, memory.

Nothing is cached: every function asks the system when it is called. The one module that knows the platform's name.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import signal
import struct
import sys
import warnings
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
F_PREALLOCATE, F_ALLOCATEALL, F_PEOFPOSMODE = 42, 4, 3  # <sys/fcntl.h> of macOS
ISA_FLAGS = (  # those that decide which kernels run, as Linux names them
    *("avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx_vnni", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "sve"),
)
SPINS = "2000"  # tens of microseconds of waiting before a thread sleeps


def end_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when its parent ends, where it can (Linux); exit at once if the parent is gone.

    Elsewhere `parent_gone` must be asked now and then. 0 is nobody's child: nothing happens.
    """
    if parent_pid == 0:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_gone(parent_pid):  # it may have ended before the call
        os._exit(1)


def parent_gone(parent_pid: int) -> bool:
    """Whether this process outlived the process that started it."""
    return parent_pid != 0 and os.getppid() != parent_pid


def own_signals() -> None:
    """Ctrl-C on the terminal belongs to the CLI; SIGTERM ends the process even in the middle of a long native call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def limit_spinning() -> None:
    """Have torch's threads sleep soon when they wait for each other. Call before torch is imported.

    GNU OpenMP spins for milliseconds by default; with one more busy thread than cores, a step then takes 10 to 20 times as long.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def expect_no_numpy() -> None:
    """Keep torch from warning that numpy is missing: it is not used here, nor installed. Call before torch is imported."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


def physical_cores() -> int:
    """Cores that this process may use, without counting a core's second thread."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else cores
    return max(1, min(cores, allowed))


def cpu_model() -> tuple[str, tuple[str, ...]]:
    """What the processor calls itself, and which of ISA_FLAGS it has; "" and () where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor(), ()
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    named = {name.strip().lower(): value.strip() for name, value in facts.items()}
    has = set((named.get("flags") or named.get("features") or "").split())
    return named.get("model name", platform.machine()), tuple(flag for flag in ISA_FLAGS if flag in has)


def available_memory_bytes() -> int:
    """Memory that can be had now without swapping, within the limits set on this process (control group, address space)."""
    limits = [psutil.virtual_memory().available, _control_group_room(), _address_space_room()]
    return max(0, min(limit for limit in limits if limit is not None))


def reserve_file(fd: int, size_bytes: int) -> None:
    """Make an empty file this long, with its space on the disk taken, so that writing through a mapping cannot run out of it.

    Raises OSError (ENOSPC) when there is not so much.
    """
    if sys.platform == "linux":
        os.posix_fallocate(fd, 0, size_bytes)
        return
    request = struct.pack("@Iiqqq", F_ALLOCATEALL, F_PEOFPOSMODE, 0, size_bytes, 0)
    fcntl.fcntl(fd, F_PREALLOCATE, request)
    os.ftruncate(fd, size_bytes)


def _control_group_room() -> int | None:
    """What the memory limits of this control group and the ones above leave, None without limits. Page cache counts as free."""
    if sys.platform != "linux":
        return None
    try:
        entry = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    root = Path("/sys/fs/cgroup")
    group = root / entry.removeprefix("0::").lstrip("/")
    rooms = [
        room for folder in (group, *group.parents) if folder.is_relative_to(root) and (room := _group_room(folder)) is not None
    ]
    return min(rooms, default=None)


def _group_room(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))


def _address_space_room() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft - psutil.Process().memory_info().vms
