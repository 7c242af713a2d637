"""One group's pages against a model that only counts: each page free, owned, cached or pinned, and the lowest free one first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.blocks import PageGroup, most_pages, pages_for
from engine.runtime.batch import PAGE_TOKENS
from tests.fixtures.scripted_executor import Kind, layout_of


def group_of(pages: int, kind: Kind = None) -> PageGroup:
    return PageGroup(layout_of(kind).groups[0], pages)


@given(st.integers(0, 1000))
def test_pages_for_is_the_least_number_that_holds_the_tokens(tokens: int) -> None:
    pages = pages_for(tokens)
    assert pages * PAGE_TOKENS >= tokens > (pages - 1) * PAGE_TOKENS


@given(window=st.integers(1, 100), tokens=st.integers(1, 300))
def test_most_pages_of_a_window_is_what_feeding_token_by_token_touches(window: int, tokens: int) -> None:
    def touched(position: int) -> int:
        return position // PAGE_TOKENS - max(0, position - window + 1) // PAGE_TOKENS + 1

    found = max(touched(position) for position in range(tokens))
    assert found <= most_pages(window, tokens)
    if tokens >= window + 2 * PAGE_TOKENS:
        assert found == most_pages(window, tokens), "more pages are asked for than are ever needed"


def test_a_state_is_one_page_however_long_the_sequence() -> None:
    group = group_of(3, "state")
    assert not group.grows and group.need(1) == group.need(10_000) == 1


def test_the_lowest_free_page_is_taken_first_also_after_growth() -> None:
    group = group_of(4)
    assert [group.take() for _ in range(4)] == [0, 1, 2, 3]
    for page in (2, 0):
        group.disown(page)
    group.grow(6)
    assert [group.take() for _ in range(4)] == [0, 2, 4, 5]
    assert list(group.held()) == list(range(6)) and group.free == 0


def test_what_nobody_holds_can_neither_be_shared_nor_given_back_nor_kept_nor_dropped() -> None:
    group = group_of(2)
    for misuse in (lambda: group.own(0), lambda: group.disown(0), lambda: group.keep(0, pinned=False), lambda: group.drop(0)):
        with pytest.raises(AssertionError):
            misuse()
    with pytest.raises(AssertionError):
        group.grow(1)


class Model:
    """What a group should be: who owns each page, and how the tree keeps it (None: not)."""

    def __init__(self, pages: int) -> None:
        self.owners = [0] * pages
        self.kept: list[bool | None] = [None] * pages

    def states(self) -> dict[str, set[int]]:
        pages = range(len(self.owners))
        idle = [page for page in pages if not self.owners[page]]
        return {
            "free": {page for page in idle if self.kept[page] is None},
            "owned": {page for page in pages if self.owners[page]},
            "cached": {page for page in idle if self.kept[page] is False},
            "pinned": {page for page in idle if self.kept[page] is True},
        }


@settings(deadline=None)
@given(pages=st.integers(1, 6), seed=st.integers(0, 1 << 32))
def test_a_page_is_what_its_holders_make_it(pages: int, seed: int) -> None:
    group, model, chance = group_of(pages), Model(pages), random.Random(seed)
    for _ in range(80):
        page = chance.randrange(len(model.owners))
        held, kept = model.owners[page] > 0, model.kept[page]
        operation = chance.choice(["take", "own", "disown", "keep", "drop", "grow"])
        if operation == "take" and group.free:
            taken = group.take()
            assert taken == min(model.states()["free"])
            model.owners[taken] = 1
        elif operation == "own" and (held or kept is not None):
            group.own(page)
            model.owners[page] += 1
        elif operation == "disown" and held:
            group.disown(page)
            model.owners[page] -= 1
        elif operation == "keep" and (held or kept is not None):
            model.kept[page] = chance.random() < 0.5
            group.keep(page, pinned=bool(model.kept[page]))
        elif operation == "drop" and kept is not None:
            group.drop(page)
            model.kept[page] = None
        elif operation == "grow" and len(model.owners) < 10:
            group.grow(len(model.owners) + 1)
            model.owners.append(0)
            model.kept.append(None)
        states = model.states()
        assert (group.free, group.owned, group.cached, group.pinned) == tuple(len(states[name]) for name in states)
        assert group.at_hand == len(states["free"]) + len(states["cached"])
        assert set(group.held()) == states["owned"] | states["cached"] | states["pinned"]
        assert all(group.is_cached(p) == (p in states["cached"]) for p in range(len(model.owners)))
        group.check(*_counted(model))


@pytest.mark.parametrize("wrong", ["owner too many", "owner missing", "not in the tree", "not pinned", "lost from the free"])
def test_check_finds_what_is_wrong(wrong: str) -> None:
    group, model = group_of(4), Model(4)
    for _ in range(3):
        model.owners[group.take()] = 1
    for page in (1, 2):
        group.keep(page, pinned=page == 2)
        model.kept[page] = page == 2
    group.check(*_counted(model))
    if wrong == "owner too many":
        model.owners[0] += 1
    elif wrong == "owner missing":
        model.owners[1] = 0
    elif wrong == "not in the tree":
        model.kept[1] = None
    elif wrong == "not pinned":
        model.kept[2] = False
    else:
        group._free.clear()
    with pytest.raises(AssertionError):
        group.check(*_counted(model))


def _counted(model: Model) -> tuple[dict[int, int], dict[int, bool]]:
    owners = {page: n for page, n in enumerate(model.owners) if n}
    return owners, {page: pinned for page, pinned in enumerate(model.kept) if pinned is not None}
