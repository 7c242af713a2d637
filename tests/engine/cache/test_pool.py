"""A budget in bytes against the pages it buys."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.layout import CacheGroup, CacheLayout, Plane
from engine.cache.pool import context_pages, pages_bytes, pages_for_budget

Kept = int | Literal["full", "state"]  # a window, or everything, or a state


def _layout(*groups: tuple[Kept, int]) -> CacheLayout:
    """One group per (what it keeps, layers)."""
    return CacheLayout(tuple(_group(kept, layers) for kept, layers in groups))


def _group(kept: Kept, layers: int) -> CacheGroup:
    planes = tuple(Plane("state" if kept == "state" else "k", i, "float32", (2, 8)) for i in range(layers))
    if isinstance(kept, int):
        return CacheGroup("window", kept, (0,), planes)
    return CacheGroup(kept, None, (0,), planes)


@settings(deadline=None)
@given(
    groups=st.lists(st.tuples(st.sampled_from(["full", 8, 32, 500, "state"]), st.integers(1, 4)), min_size=1, max_size=3),
    budget=st.integers(0, 10_000_000),
    context=st.integers(1, 3000),
    sequences=st.integers(1, 20),
    chunk=st.integers(1, 600),
)
def test_a_budget_is_never_exceeded_and_used_up_when_it_can_be(
    groups: list[tuple[Kept, int]], budget: int, context: int, sequences: int, chunk: int
) -> None:
    layout = _layout(*groups)
    pages = pages_for_budget(layout, budget, context_tokens=context, max_sequences=sequences, max_step_tokens=chunk)
    cost, one = pages_bytes(layout, pages), context_pages(layout, context)
    assert cost <= budget
    if pages_bytes(layout, one) <= budget:
        assert all(have >= need for have, need in zip(pages, one, strict=True)), "one sequence of full context must fit"
    most = pages_for_budget(layout, 1 << 60, context_tokens=context, max_sequences=sequences, max_step_tokens=chunk)
    assert all(have <= cap for have, cap in zip(pages, most, strict=True))
    if pages != most:
        assert budget - cost < sum(group.bytes_per_page for group in layout.groups), "a page of every group was left unbought"


def test_a_full_group_is_capped_by_what_all_sequences_can_use() -> None:
    layout = _layout(("full", 1))
    assert pages_for_budget(layout, 1 << 60, context_tokens=100, max_sequences=3, max_step_tokens=64) == (21,)


def test_a_window_group_needs_its_windows_and_one_chunk() -> None:
    layout = _layout(("full", 1), (32, 1))
    pages = pages_for_budget(layout, 1 << 60, context_tokens=1000, max_sequences=3, max_step_tokens=64)
    assert pages == (3 * 63, 3 * 3 + 4)


def test_a_budget_of_nothing_buys_nothing() -> None:
    assert pages_for_budget(_layout(("full", 1)), 100, context_tokens=100, max_sequences=3, max_step_tokens=64) == (0,)


@pytest.mark.parametrize("context", [1, 100, 100_000])
def test_a_sequence_has_one_state_however_long_it_is(context: int) -> None:
    layout = _layout(("full", 1), ("state", 3))
    assert context_pages(layout, context) == (-(-context // 16), 1)
    assert pages_bytes(layout, (0, 1)) == 3 * 2 * 8 * 4


def test_states_are_two_a_sequence_at_most() -> None:
    """One that it lives by, one more to keep as a prefix."""
    layout = _layout(("full", 1), ("state", 1))
    pages = pages_for_budget(layout, 1 << 60, context_tokens=1000, max_sequences=3, max_step_tokens=64)
    assert pages == (3 * 63, 3 * 2)
