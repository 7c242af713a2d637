"""The page allocator against naive counting: nothing is lost, shared by accident or freed twice, whatever the order of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from engine.cache.blocks import BlockAllocator, BlockTable, PageGroup, most_pages, pages_for
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS
from tests.fixtures.scripted_executor import layout_of


@given(window=st.integers(1, 80), tokens=st.integers(1, 200))
def test_most_pages_is_what_counting_every_query_finds(window: int, tokens: int) -> None:
    worst = max(len({t // PAGE_TOKENS for t in range(max(0, q - window + 1), q + 1)}) for q in range(5 * PAGE_TOKENS + tokens))
    touched = max(len({t // PAGE_TOKENS for t in range(max(0, q - window + 1), q + 1)}) for q in range(tokens))
    assert touched <= most_pages(window, tokens) <= worst
    assert most_pages(None, tokens) == len({t // PAGE_TOKENS for t in range(tokens)})


def test_a_page_goes_back_with_its_last_holder() -> None:
    group = PageGroup(None, 2)
    page = group.take()
    group.retain(page)
    group.check(Counter({page: 2}))
    group.release(page)
    assert group.free == 1
    group.release(page)
    assert group.free == 2
    group.check(Counter())


def test_releasing_or_sharing_a_free_page_is_a_fault() -> None:
    group = PageGroup(None, 1)
    with pytest.raises(AssertionError, match="released"):
        group.release(0)
    with pytest.raises(AssertionError, match="shared"):
        group.retain(0)


@pytest.mark.parametrize("held", [Counter(), Counter({0: 2}), Counter({0: 1, 1: 1})])
def test_check_finds_what_does_not_add_up(held: Counter[int]) -> None:
    group = PageGroup(None, 3)
    group.take()
    with pytest.raises(AssertionError):
        group.check(held)


def test_check_finds_a_page_in_two_tables() -> None:
    blocks = BlockAllocator(layout_of(None), [3])
    one, two = blocks.table(), blocks.table()
    blocks.extend(one, 1)
    two.pages[0].append(one.pages[0][0])
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check([one, two])


def test_pages_are_handed_out_from_the_bottom_and_used_again() -> None:
    blocks = BlockAllocator(layout_of(None), [100])
    for _ in range(5):
        table = blocks.table()
        blocks.extend(table, 3 * PAGE_TOKENS)
        assert sorted(table.pages[0]) == [0, 1, 2]
        blocks.release(table)


@settings(deadline=None)
@given(window=st.integers(1, 70), steps=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_trimmed_window_keeps_every_page_a_query_needs_and_no_other(window: int, steps: list[int]) -> None:
    blocks = BlockAllocator(layout_of(None, window), [100, 100])
    table, done = blocks.table(), 0
    for count in steps:
        blocks.extend(table, done + count)
        done += count
        blocks.trim(table, done)
        blocks.check([table])
        needed = {t // PAGE_TOKENS for t in range(max(0, done - window + 1), done)} | {
            i for i in range(len(table.pages[1])) if i * PAGE_TOKENS >= done
        }
        held = {i for i, page in enumerate(table.pages[1]) if page != NO_PAGE}
        assert needed <= held
        assert all((i + 1) * PAGE_TOKENS > done - window + 1 for i in held)
        assert NO_PAGE not in table.pages[0]


class Allocation(RuleBasedStateMachine):
    """Tables come, grow, lose their past and go, in any order; the model is a set of page numbers per table."""

    tables = Bundle("tables")

    @initialize(pages=st.integers(1, 12), window=st.sampled_from([None, 1, 16, 17, 40]))
    def start(self, pages: int, window: int | None) -> None:
        self.layout = layout_of(None, window)
        self.blocks = BlockAllocator(self.layout, [pages, pages])
        self.live: dict[BlockTable, int] = {}

    @rule(target=tables)
    def new(self) -> BlockTable:
        table = self.blocks.table()
        self.live[table] = 0
        return table

    @rule(table=tables, more=st.integers(1, 60))
    def grow(self, table: BlockTable, more: int) -> None:
        if table not in self.live:
            return
        room = self.blocks.room(table)
        assert room == table.tokens + PAGE_TOKENS * min(g.free for g in self.blocks.groups)
        tokens = min(self.live[table] + more, room)
        if tokens > self.live[table]:
            self.blocks.extend(table, tokens)
            self.live[table] = tokens
            assert table.tokens >= tokens

    @rule(table=tables, back=st.integers(0, 30))
    def trim(self, table: BlockTable, back: int) -> None:
        if table in self.live:
            self.blocks.trim(table, max(0, self.live[table] - back))

    @rule(table=consumes(tables))
    def drop(self, table: BlockTable) -> None:
        if self.live.pop(table, None) is not None:
            self.blocks.release(table)
            assert table.tokens == 0

    @precondition(lambda self: hasattr(self, "blocks"))
    @invariant()
    def balances(self) -> None:
        self.blocks.check(self.live)
        for index, group in enumerate(self.blocks.groups):
            held = [page for table in self.live for page in table.pages[index] if page != NO_PAGE]
            assert len(held) == len(set(held)), "two tables hold one page"
            assert group.free == group.total - len(held)
        for table, tokens in self.live.items():
            assert len(table.pages[0]) == pages_for(tokens)


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
