"""The operating system calls of the daemon that differ between Linux and macOS.

Nothing here knows HTTP or the configuration. Every function takes plain file descriptors and sockets.
"""

from __future__ import annotations

import resource
import select
import socket
import struct
import sys

LINUX = sys.platform == "linux"


def peer_uid(sock: socket.socket) -> int | None:
    """The user id of the process at the other end of a Unix socket, as the kernel saw it when it connected; None if unknown."""
    if LINUX:
        _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return uid
    local_peercred = 1  # struct xucred {u_int version; uid_t uid; ...} at level SOL_LOCAL, which is 0
    version, uid = struct.unpack("=Ii", sock.getsockopt(0, local_peercred, 76)[:8])
    return uid if version == 0 else None


def hung_up(fd: int) -> bool:
    """Whether the other end closed both directions (or reset). False for a half-closed Unix socket, whose reader still waits."""
    if fd < 0:
        return True
    poller = select.poll()
    poller.register(fd, 0)  # POLLHUP and POLLERR are always reported
    return bool(poller.poll(0))


def raise_file_limit(wanted: int) -> int:
    """Raises the soft limit of open files towards `wanted`, as far as the hard limit goes. Returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if target > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (ValueError, OSError):
            return soft
        return target
    return soft
