"""All open connections of the daemon: how many there may be, from whom, and which are overdue (S20).

A newcomer beyond a cap takes the place of the connection that has waited longest for a request, so that sockets which send nothing
or drip cannot lock anybody out; where every place is busy with a request it gets 503. The caps stay below the limit of open files,
so accepting never fails. `sweep` is called ten times a second and applies every timeout; nothing else keeps timers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from daemon.config import Settings
from daemon.logs import Throttle
from daemon.refusal import Refusal

if TYPE_CHECKING:
    from daemon.protocol import Connection
    from daemon.security import PeerInfo

RESERVED_FILES = 48
"""Open files kept for everything that is not a client: listeners, logs, models, worker sockets."""

REFUSED_KEPT = 16
"""Refused connections that may linger until their client read the refusal; further ones are cut."""

PAUSE_S = 2.0
"""A sweep this late means that the process was stopped: clients are not blamed for that time."""


class Connections:
    """The connections that count (`admitted`, also by peer) and those that only still exist (`open`)."""

    def __init__(self, settings: Settings, file_limit: int) -> None:
        self.settings = settings
        self.limit = max(1, min(settings.max_connections, file_limit - RESERVED_FILES - REFUSED_KEPT))
        self.open: set[Connection] = set()
        self.admitted: set[Connection] = set()
        self._users = {str(os.getuid()), "0", *settings.allowed_uids}
        self._by_peer: dict[PeerInfo, set[Connection]] = {}
        self._throttle = Throttle(logging.getLogger("daemon.connections"))
        self._swept_at: float | None = None

    def admit(self, connection: Connection) -> None:
        """Counts a new connection, or raises the Refusal that it gets."""
        self.open.add(connection)
        of_peer = self._by_peer.setdefault(connection.peer, set())
        per_peer = self.settings.max_connections_per_peer
        if self._is_full(of_peer, per_peer) or self._is_full(self.admitted, self.limit):
            raise Refusal(503, "too_many_connections", "too many connections", headers=((b"retry-after", b"1"),))
        of_peer.add(connection)
        self.admitted.add(connection)

    def is_user(self, uid: int | None) -> bool:
        """Whether a user may use the Unix socket: the daemon's own, root, and those whom the settings name."""
        return "*" in self._users or str(uid) in self._users

    @property
    def crowded(self) -> bool:
        """Whether so many refused connections linger already that one more is cut without an answer."""
        return len(self.open) - len(self.admitted) > REFUSED_KEPT

    def discount(self, connection: Connection) -> None:
        """Frees the place of a connection that is being refused or is gone."""
        self.admitted.discard(connection)
        of_peer = self._by_peer.get(connection.peer, set())
        of_peer.discard(connection)
        if not of_peer:
            self._by_peer.pop(connection.peer, None)

    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.discount(connection)

    def sweep(self, now: float) -> None:
        """Applies every timeout."""
        pause_s = now - (self._swept_at or now)
        self._swept_at = now
        for connection in list(self.open):
            if pause_s > PAUSE_S:
                connection.forgive(pause_s)
            connection.check(now)

    def busy(self) -> list[Connection]:
        return [connection for connection in self.open if connection.busy]

    def note(self, refusal: Refusal, peer: PeerInfo) -> None:
        """One rate-limited log line about a refusal at the connection level."""
        who = f"user {peer.uid}" if peer.kind == "unix" else peer.address
        self._throttle.warn(f"{refusal.status} {refusal.code}", f"refused {who}: {refusal.status} {refusal.message}")

    def _is_full(self, crowd: set[Connection], cap: int) -> bool:
        return len(crowd) >= cap and not self._make_room(crowd)

    def _make_room(self, crowd: Iterable[Connection]) -> bool:
        waiting = [connection for connection in crowd if not connection.busy]
        if not waiting:
            return False
        victim = min(waiting, key=lambda connection: connection.waiting_since)
        self.discount(victim)
        victim.evict()
        return True
