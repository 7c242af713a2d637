"""The memory floor: how many tokens per second a decode could give at most, from what it must read and how fast memory is read.

A step reads every weight once, for all its sequences together, and the cached keys and values of each; of an embedding that
is not the head too it reads a row. Read bandwidth is measured by the CPU backend's library, in the same process as the tests: of
memory, over a large buffer, and over as many bytes as a step reads, which may partly lie in a cache of the processor. A test is
held against the latter, the harder floor. Invariant: a share above 100% means that a figure or this count is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec

from engine.bench.notation import SpeedTest
from engine.bench.timing import Spread, spread
from engine.cache.layout import CacheGroup, CacheLayout
from engine.errors import CavectlError
from engine.runtime.batch import PAGE_TOKENS

BUFFER_BYTES = 256 << 20
LEAST_BUFFER_BYTES = 1 << 20
REPEATS = 9
_ERROR_BYTES = 512


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s of reading `buffer_bytes`, all threads together."""

    buffer_bytes: int
    one_thread: Spread
    all_threads: Spread
    threads: int


class TestFloor(msgspec.Struct, frozen=True, kw_only=True):
    bytes_per_token: float
    step_gb_per_s: float  # the best, reading what a step reads with all threads
    tokens_per_s: float  # at that
    percent: float  # of it that the median of the test reached


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """`bandwidth` is memory's. It is null, and `why` says it, where there was nothing to measure it with."""

    bandwidth: Bandwidth | None
    why: str | None
    weight_bytes: int  # read in every step
    tests: dict[str, TestFloor]


def read_bandwidth(buffer_bytes: int, threads: int) -> Spread:
    """In GB/s. Raises CavectlError where there is no native library, or no memory."""
    from engine.kernels.cpu import lib

    function = lib.load().functions.cavectl_read_bandwidth
    figures, error = (ctypes.c_double * REPEATS)(), ctypes.create_string_buffer(_ERROR_BYTES)
    if function(buffer_bytes, threads, REPEATS, figures, error):
        raise CavectlError(error.value.decode("utf-8", "replace"), code="out_of_memory")
    return spread([round(figure / 1e9, 2) for figure in figures])


def measure(threads: int, weight_bytes: int, layout: CacheLayout, medians: Sequence[tuple[SpeedTest, float]]) -> Floor:
    """`medians`: tokens per second of tests; prefills have no floor here, they are bound by arithmetic."""
    try:
        one, all_ = (read_bandwidth(BUFFER_BYTES, count) for count in (1, threads))
        tests = {test.name: _reached(test, median, threads, weight_bytes, layout) for test, median in medians if test.is_decode}
    except CavectlError as error:
        return Floor(bandwidth=None, why=error.message, weight_bytes=weight_bytes, tests={})
    memory = Bandwidth(buffer_bytes=BUFFER_BYTES, one_thread=one, all_threads=all_, threads=threads)
    return Floor(bandwidth=memory, why=None, weight_bytes=weight_bytes, tests=tests)


def _reached(test: SpeedTest, median: float, threads: int, weight_bytes: int, layout: CacheLayout) -> TestFloor:
    token_bytes = bytes_per_token(test, weight_bytes, layout)
    step_bytes = max(LEAST_BUFFER_BYTES, round(token_bytes * test.sequences))
    return share(token_bytes, median, read_bandwidth(step_bytes, threads).most * 1e9)


def share(token_bytes: float, tokens_per_s: float, bytes_per_s: float) -> TestFloor:
    most = bytes_per_s / token_bytes
    return TestFloor(
        bytes_per_token=token_bytes,
        step_gb_per_s=round(bytes_per_s / 1e9, 2),
        tokens_per_s=round(most, 1),
        percent=round(100 * tokens_per_s / most, 1),
    )


def bytes_per_token(test: SpeedTest, weight_bytes: int, layout: CacheLayout) -> float:
    """What a decode reads for one token, in the middle of the test."""
    return weight_bytes / test.sequences + sum(_cached_bytes(group, test.mean_depth) for group in layout.groups)


def _cached_bytes(group: CacheGroup, depth: float) -> float:
    if group.kind == "state":
        return group.bytes_per_page
    seen = depth if group.window_tokens is None else min(depth, group.window_tokens)
    return group.bytes_per_page / PAGE_TOKENS * seen
