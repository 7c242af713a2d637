"""Whose turn it is: priority classes that waiting softens, and fairness between clients within a class.

A class is 0 (high), 1 (normal) or 2 (low). A sequence that got nothing for `aging_s` counts one class up from then on. Within a
class the client that was served fewest tokens in the last WINDOW_S seconds goes first, and of one client the oldest sequence.
Not here: what a turn brings (scheduler.py). Invariant: `rank` only falls while a sequence lives, so nobody waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from engine.scheduler.sequence import Sequence

WINDOW_S = 10.0
SLICE_S = 0.25  # service is remembered in slices of this length

CLASSES = {"high": 0, "normal": 1, "low": 2}
LOW = CLASSES["low"]


def rank(sequence: Sequence) -> int:
    """The class that `sequence` counts in now; 0 goes first."""
    return max(0, CLASSES[sequence.request.priority] - sequence.promoted)


def seniority(sequence: Sequence) -> tuple[int, int]:
    """The order in which sequences keep their pages when these run out: the greatest gives way first."""
    return rank(sequence), sequence.id


class Policy:
    def __init__(self, *, aging_s: float) -> None:
        self._aging_s = aging_s
        self._served: dict[str, _Service] = {}

    def age(self, sequences: Iterable[Sequence], now: float) -> None:
        """Promote those that got nothing for too long."""
        for sequence in sequences:
            if now - sequence.last_served >= self._aging_s and rank(sequence) > 0:
                sequence.promoted += 1
                sequence.last_served = now

    def charge(self, client: str, tokens: int, now: float) -> None:
        """`client` was served: so many tokens of its sequences are in the step that starts at `now`."""
        if client not in self._served:
            self._forget(now)
            self._served[client] = _Service()
        self._served[client].add(tokens, now)

    def served(self, client: str, now: float) -> int:
        """Tokens of the last WINDOW_S seconds."""
        service = self._served.get(client)
        return service.total(now) if service else 0

    def turns(self, sequences: Iterable[Sequence], now: float) -> Turns:
        return Turns(self, sequences, now)

    def _forget(self, now: float) -> None:
        for client in [client for client, service in self._served.items() if not service.total(now)]:
            del self._served[client]


class Turns:
    """Iterates over sequences in the order of their turns. Say with `gave` what a turn brought: it moves the client back."""

    def __init__(self, policy: Policy, sequences: Iterable[Sequence], now: float) -> None:
        lines: dict[tuple[int, str], list[Sequence]] = {}
        for sequence in sequences:
            lines.setdefault((rank(sequence), sequence.request.client), []).append(sequence)
        for line in lines.values():
            line.sort(key=lambda sequence: -sequence.id)
        served = {client: policy.served(client, now) for _, client in lines}
        self._heap = [(rank, served[client], line[-1].id, line) for (rank, client), line in lines.items()]
        heapify(self._heap)
        self._given = 0

    def gave(self, tokens: int) -> None:
        """The sequence last handed out got so many tokens."""
        self._given += tokens

    def __iter__(self) -> Iterator[Sequence]:
        while self._heap:
            rank, served, _, line = self._heap[0]
            self._given = 0
            yield line.pop()
            if line:
                heapreplace(self._heap, (rank, served + self._given, line[-1].id, line))
            else:
                heappop(self._heap)


class _Service:
    """Tokens of one client in slices of time."""

    def __init__(self) -> None:
        self._slices: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, tokens: int, now: float) -> None:
        self._total += tokens
        if self._slices and now - self._slices[-1][0] < SLICE_S:
            start, before = self._slices.pop()
            self._slices.append((start, before + tokens))
        else:
            self._slices.append((now, tokens))

    def total(self, now: float) -> int:
        while self._slices and now - self._slices[0][0] > WINDOW_S:
            self._total -= self._slices.popleft()[1]
        return self._total
