"""What a step may contain: its budget, its order, its pages. Random schedules, no model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.blocks import BlockAllocator, pages_for
from engine.runtime.batch import FROM_PREVIOUS, NO_PAGE, PAGE_TOKENS
from engine.scheduler.scheduler import Plan, Scheduler
from engine.scheduler.sequence import Sequence
from engine.types import EngineRequest
from tests.fixtures.scripted_executor import layout_of


def _sequence(scheduler: Scheduler, number: int, prompt: int, limit: int = 100) -> Sequence:
    request = EngineRequest(id=number, prompt=list(range(prompt)), max_tokens=limit)
    table = scheduler.blocks.table()
    return Sequence(number, request, 0, limit, table, 0.0, tokens=list(request.prompt))


def _scheduler(pages: int, *, budget: int = 32, sequences: int = 8) -> Scheduler:
    return Scheduler(BlockAllocator(layout_of(None), [pages]), max_step_tokens=budget, max_sequences=sequences)


def _confirm(scheduler: Scheduler, plan: Plan, ended: frozenset[int] = frozenset()) -> None:
    """As the engine does after a step: every draw is token 1; sequences in `ended` stop there."""
    for row in plan.rows:
        if row.live:
            scheduler.confirm(row)
            if row.draws:
                row.sequence.tokens.append(1)
                if row.sequence.id in ended:
                    scheduler.remove(row.sequence)


def _counts(plan: Plan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return [(row.sequence.id, row.count) for row in plan.rows]


def test_decodes_go_before_prompts_and_prompts_in_order_of_arrival() -> None:
    scheduler = _scheduler(100)
    scheduler.add(_sequence(scheduler, 0, 4))
    plan = scheduler.schedule(1, 0.0)
    assert plan is not None and _counts(plan) == [(0, 4)]
    _confirm(scheduler, plan)
    for number in (1, 2, 3):
        scheduler.add(_sequence(scheduler, number, 20))
    plan = scheduler.schedule(2, 0.0)
    assert plan is not None and _counts(plan) == [(0, 1), (1, 20), (2, 11)]
    assert (plan.decode_tokens, plan.prefill_tokens) == (1, 31)
    _confirm(scheduler, plan)
    assert _counts(scheduler.schedule(3, 0.0)) == [(0, 1), (1, 1), (2, 9), (3, 20)]


def test_decodes_never_outnumber_the_budget() -> None:
    scheduler = _scheduler(100, budget=2)
    for number in range(5):
        scheduler.add(_sequence(scheduler, number, 1, limit=6))
    for step in range(1, 19):
        plan = scheduler.schedule(step, 0.0)
        assert plan is not None and len(plan.rows) == len(scheduler.running) <= 2, "a running sequence was left out"
        ended = frozenset(row.sequence.id for row in plan.rows if row.sequence.output_tokens + 1 >= row.sequence.limit)
        _confirm(scheduler, plan, ended)
    assert not scheduler.running and not len(scheduler.waiting)


def test_a_sequence_starts_only_while_the_running_ones_can_still_grow() -> None:
    scheduler = _scheduler(3)
    for number in range(3):
        scheduler.add(_sequence(scheduler, number, 10))
    assert _counts(scheduler.schedule(1, 0.0)) == [(0, 10), (1, 10)], "the third page is for the first two"
    scheduler.check()


def test_a_draw_not_yet_collected_can_be_fed_in_the_very_next_step_only() -> None:
    scheduler = _scheduler(10)
    scheduler.add(_sequence(scheduler, 0, 4))
    scheduler.schedule(1, 0.0)
    scheduler.check()
    assert scheduler.schedule(3, 0.0) is None
    plan = scheduler.schedule(2, 0.0)
    assert plan is not None and plan.inputs.rows[0].tokens == [FROM_PREVIOUS] and plan.inputs.rows[0].position == 4
    scheduler.check()


def test_slots_closed_by_a_step_that_failed_are_closed_again_unless_they_are_in_use() -> None:
    scheduler = _scheduler(10)
    for number in (0, 1):
        scheduler.add(_sequence(scheduler, number, 4))
    plan = scheduler.schedule(1, 0.0)
    assert plan is not None
    _confirm(scheduler, plan, frozenset({0, 1}))
    scheduler.add(_sequence(scheduler, 2, 4))
    plan = scheduler.schedule(2, 0.0)
    assert plan is not None and plan.inputs.closed == [0, 1]
    used = plan.rows[0].sequence.slot
    again = scheduler.dispatch(3, scheduler.rewind(plan))
    assert again.inputs.closed == [1 - used] and [slot.slot for slot in again.inputs.opened] == [used]


def test_whoever_gives_up_its_pages_loses_its_row_of_the_same_step() -> None:
    """An older sequence in mid-prompt beside a younger that decodes: not by arrival, but a policy may come to it."""
    scheduler = _scheduler(7, budget=3)
    scheduler.add(_sequence(scheduler, 5, 3))
    for step in range(1, 100):
        if step == 29:
            scheduler.add(_sequence(scheduler, 1, 60))
        plan = scheduler.schedule(step, 0.0)
        assert plan is not None
        if step >= 29 and 5 not in scheduler.running:
            assert _counts(plan) == [(1, 2)]
            return
        assert _counts(plan) == ([(5, 3 if step == 1 else 1)] if step < 29 else [(5, 1), (1, 2)])
        _confirm(scheduler, plan)
    raise AssertionError("nobody gave way")


def test_the_youngest_waits_with_its_pages_and_gives_them_up_only_to_an_older_one() -> None:
    scheduler = _scheduler(3, budget=64)
    old, young = (_sequence(scheduler, number, PAGE_TOKENS) for number in (0, 1))
    scheduler.add(old)
    scheduler.add(young)
    plan = scheduler.schedule(1, 0.0)
    assert plan is not None and _counts(plan) == [(0, 16), (1, 16)]
    _confirm(scheduler, plan)
    for step in range(2, 2 + PAGE_TOKENS):  # the old one fills the third page, the young one keeps its own
        plan = scheduler.schedule(step, 0.0)
        assert plan is not None and _counts(plan) == [(0, 1)]
        assert young.id in scheduler.running and young.computed == PAGE_TOKENS
        _confirm(scheduler, plan)
    plan = scheduler.schedule(2 + PAGE_TOKENS, 0.0)
    assert plan is not None and _counts(plan) == [(0, 1)]
    scheduler.check()
    later = _sequence(scheduler, 2, PAGE_TOKENS)
    scheduler.add(later)
    assert [s.id for s in scheduler.waiting] == [1, 2], "a preempted sequence keeps its place"
    assert young.output_tokens == 1 and young.computed == 0 and not young.table.tokens


def test_a_preempted_sequence_opens_its_slot_again_with_the_output_so_far() -> None:
    scheduler = _scheduler(3, budget=64)
    for number in (0, 1):
        scheduler.add(_sequence(scheduler, number, PAGE_TOKENS, limit=PAGE_TOKENS + 2))
    opened, step = [], 0
    while len(scheduler.running) + len(scheduler.waiting):
        step += 1
        plan = scheduler.schedule(step, 0.0)
        assert plan is not None
        opened += [
            (row.sequence.id, slot.output) for slot in plan.inputs.opened for row in plan.rows if row.sequence.slot == slot.slot
        ]
        ended = frozenset(row.sequence.id for row in plan.rows if row.sequence.output_tokens + 1 >= row.sequence.limit)
        _confirm(scheduler, plan, ended)
    assert opened == [(0, []), (1, []), (1, [1])]


def test_a_window_gives_pages_back_while_a_long_prompt_goes_through() -> None:
    scheduler = Scheduler(BlockAllocator(layout_of(None, 20), [100, 4]), max_step_tokens=16, max_sequences=4)
    scheduler.add(_sequence(scheduler, 0, 500))
    for step in range(1, 33):
        plan = scheduler.schedule(step, 0.0)
        assert plan is not None
        held = [page for page in plan.inputs.rows[0].pages[1] if page != NO_PAGE]
        assert len(held) == len(set(held)) <= 4
        _confirm(scheduler, plan)
        scheduler.check()


class Schedule(RuleBasedStateMachine):
    """Requests come, steps run, sequences end or are taken away; pages, slots and the budget hold throughout."""

    @initialize(
        pages=st.integers(2, 14),
        budget=st.sampled_from([1, 3, 16, 64]),
        slots=st.integers(1, 5),
        window=st.sampled_from([None, 1, 20, 40]),
    )
    def start(self, pages: int, budget: int, slots: int, window: int | None) -> None:
        blocks = BlockAllocator(layout_of(None, window), [pages, pages])
        self.scheduler = Scheduler(blocks, max_step_tokens=budget, max_sequences=slots)
        self.budget, self.room = budget, pages * PAGE_TOKENS
        self.sequences: dict[int, Sequence] = {}
        self.number = self.step = 0

    @rule(prompt=st.integers(1, 60), limit=st.integers(1, 60))
    def add(self, prompt: int, limit: int) -> None:
        prompt = min(prompt, self.room)
        limit = min(limit, self.room - prompt + 1)
        self.sequences[self.number] = sequence = _sequence(self.scheduler, self.number, prompt, limit)
        self.number += 1
        self.scheduler.add(sequence)

    @rule()
    def run(self) -> None:
        self.step += 1
        plan = self.scheduler.schedule(self.step, 0.0)
        if not self.sequences:
            assert plan is None
            return
        assert plan is not None, "there is work and nothing runs"
        self._check(plan)
        _confirm(self.scheduler, plan)
        for row in plan.rows:
            if row.sequence.output_tokens >= row.sequence.limit:
                self._end(row.sequence)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.sequences:
            self._end(self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))])

    @rule()
    def undo(self) -> None:
        """A step that failed: submitted, brought nothing."""
        self.step += 1
        if plan := self.scheduler.schedule(self.step, 0.0):
            assert self.scheduler.rewind(plan) == plan.rows
            assert all(row.sequence.scheduled == row.sequence.computed for row in plan.rows)

    def _end(self, sequence: Sequence) -> None:
        del self.sequences[sequence.id]
        self.scheduler.remove(sequence)
        assert not sequence.table.tokens

    def _check(self, plan: Plan) -> None:
        rows = plan.inputs.rows
        assert 0 < sum(len(row.tokens) for row in rows) <= self.budget
        assert len({row.sequence for row in rows}) == len(rows)
        for group in range(2):
            pages = [page for row in rows for page in row.pages[group] if page != NO_PAGE]
            assert len(pages) == len(set(pages)), "two rows share a page"
        for row, planned in zip(rows, plan.rows, strict=True):
            sequence = planned.sequence
            end = row.position + len(row.tokens)
            assert row.tokens == sequence.tokens[row.position : end]
            assert row.position == sequence.computed
            assert len(row.pages[0]) >= pages_for(end)
            assert (row.sampling >= 0) == (end == len(sequence.tokens))
        slots = [row.sampling for row in rows if row.sampling >= 0]
        assert len(slots) == len(set(slots))

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def balances(self) -> None:
        self.scheduler.check()
        waiting = [s.id for s in self.scheduler.waiting]
        assert sorted([*self.scheduler.running, *waiting]) == sorted(self.sequences)


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(deadline=None, max_examples=60, stateful_step_count=60)


@settings(deadline=None, max_examples=50)
@given(
    prompts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    budget=st.sampled_from([1, 2, 16, 64]),
    pages=st.integers(6, 10),
)
def test_everybody_ends_and_the_oldest_is_never_preempted(prompts: list[int], budget: int, pages: int) -> None:
    scheduler = _scheduler(pages, budget=budget)
    alive = {number: _sequence(scheduler, number, prompt, 40) for number, prompt in enumerate(prompts)}
    for sequence in alive.values():
        scheduler.add(sequence)
    step = 0
    while alive:
        step += 1
        oldest = alive[min(alive)]
        before = oldest.computed
        plan = scheduler.schedule(step, 0.0)
        assert plan is not None
        assert oldest.computed == before, "the oldest was preempted"
        assert oldest.scheduled > before or sum(row.count for row in plan.rows) == budget, "the oldest stands still"
        _confirm(scheduler, plan, frozenset(n for n, s in alive.items() if s.output_tokens + 1 >= s.limit))
        alive = {n: s for n, s in alive.items() if s.output_tokens < s.limit}
        assert step < 20_000, "no end"
