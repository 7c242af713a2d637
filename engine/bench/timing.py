"""The clock of all measurements, and what is said of a list of them: spread of repeats, tail of latencies.

Percentiles are of the sorted values, interpolated linearly between the two nearest ranks: share s of n values stands at rank
s * (n - 1), counted from 0. So the 99th of fewer than 100 values is little less than the largest: look at `count` too.
Nothing here knows what was measured. No numpy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def seconds() -> float:
    """Monotonic time from `perf_counter_ns`; only differences mean something."""
    return time.perf_counter_ns() / 1e9


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of `values` lie. Raises ValueError when there are none."""
    if not values or not 0 <= share <= 1:
        raise ValueError("a percentile needs values and a share from 0 to 1")
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Spread(msgspec.Struct, frozen=True):
    """Repeats of one figure: the middle one, the outermost ones, how many there were."""

    median: float
    least: float
    most: float
    count: int


class Tail(msgspec.Struct, frozen=True):
    """Many latencies, and how bad the worst of them are."""

    p50: float
    p95: float
    p99: float
    most: float
    mean: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(percentile(values, 0.5), min(values), max(values), len(values))


def tail(values: Sequence[float]) -> Tail:
    p50, p95, p99 = (percentile(values, share) for share in (0.5, 0.95, 0.99))
    return Tail(p50, p95, p99, max(values), sum(values) / len(values), len(values))


def in_turn(variants: Sequence[_T], number: int) -> list[_T]:
    """All `variants`, each round (`number`) beginning with the next one: none is always measured right after another."""
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]
