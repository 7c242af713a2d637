from __future__ import annotations

import statistics
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench import timing
from engine.bench.timing import Spread, in_turn, percentile, spread, tail

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_percentiles_are_those_of_the_standard_library(some: list[float]) -> None:
    cuts = statistics.quantiles(some, n=100, method="inclusive")
    for hundredth in (1, 25, 50, 75, 95, 99):
        assert percentile(some, hundredth / 100) == pytest.approx(cuts[hundredth - 1], rel=1e-9, abs=1e-9)


@given(values, st.integers(0, 1000))
def test_a_percentile_is_the_interpolated_rank(some: list[float], thousandth: int) -> None:
    """In exact fractions: so much of the way from the value at the rank below to the one above."""
    ordered = [Fraction(value) for value in sorted(some)]
    rank = Fraction(thousandth / 1000) * (len(some) - 1)
    below = int(rank)
    above = ordered[min(below + 1, len(some) - 1)]
    assert percentile(some, thousandth / 1000) == pytest.approx(float(ordered[below] + (above - ordered[below]) * (rank - below)))


def test_order_does_not_matter_and_the_ends_are_the_ends() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == percentile([2.0, 3.0, 1.0], 0.5) == 2.0
    assert (percentile([3.0, 1.0, 2.0], 0), percentile([3.0, 1.0, 2.0], 1)) == (1.0, 3.0)
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(("some", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_no_percentile_of_nothing_or_beyond_the_ends(some: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(some, share)


@given(values)
def test_spread_and_tail(some: list[float]) -> None:
    assert spread(some) == Spread(pytest.approx(statistics.median(some)), min(some), max(some), len(some))
    latencies = tail(some)
    assert latencies.p50 == spread(some).median
    assert latencies.p50 <= latencies.p95 <= latencies.p99 <= latencies.most == max(some)
    assert latencies.mean == pytest.approx(statistics.fmean(some)) and latencies.count == len(some)


def test_every_variant_comes_first_once() -> None:
    rounds = [in_turn("abc", number) for number in range(4)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_seconds_are_those_of_the_performance_counter() -> None:
    before, now, after = time.perf_counter_ns(), timing.seconds(), time.perf_counter_ns()
    assert before / 1e9 <= now <= after / 1e9
