"""Where snapshots of a recurrent state are due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.state import SNAPSHOT_TOKENS, is_stop, next_stop, stops_of
from engine.runtime.batch import PAGE_TOKENS


@given(tokens=st.integers(1, 5000), branch=st.integers(0, 5000), hit=st.integers(0, 5000))
def test_a_stop_is_a_page_end_past_the_hit_that_leaves_a_token_to_compute(tokens: int, branch: int, hit: int) -> None:
    branch, hit = min(branch, tokens - 1), min(hit, tokens - 1)
    stops = stops_of(tokens, branch, hit)
    assert all(hit < stop < tokens and stop % PAGE_TOKENS == 0 for stop in stops)
    for wanted in ((tokens - 1) // PAGE_TOKENS, branch // PAGE_TOKENS):
        assert wanted * PAGE_TOKENS in stops or wanted * PAGE_TOKENS <= hit
    assert len(stops) <= 2


@given(tokens=st.integers(1, 5000), branch=st.integers(0, 5000), start=st.integers(0, 6000))
def test_the_next_stop_is_the_first_that_is_one(tokens: int, branch: int, start: int) -> None:
    stops = stops_of(tokens, min(branch, tokens - 1), 0)
    naive = next(position for position in range(start + 1, start + SNAPSHOT_TOKENS + 1) if is_stop(stops, position))
    assert next_stop(stops, start) == naive


def test_nothing_is_due_before_the_first_token() -> None:
    assert not is_stop(stops_of(PAGE_TOKENS, 0, 0), 0)
    assert next_stop(set(), 0) == SNAPSHOT_TOKENS == 1024
