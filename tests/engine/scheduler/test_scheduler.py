"""What a step may contain: its budget, its order, its pages, shared prefixes. Random schedules, no model."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.blocks import pages_for
from engine.runtime.batch import FROM_PREVIOUS, NO_PAGE, PAGE_TOKENS
from engine.scheduler.plan import Plan
from engine.scheduler.policy import seniority
from tests.engine.scheduler.simulation import Simulation, counts_of, make_scheduler, make_sequence
from tests.fixtures.scripted_executor import Kind, layout_of

# --- order and budget ------------------------------------------------------------------------------------------------------------


def test_decodes_go_before_prompts_and_prompts_in_order_of_arrival() -> None:
    run = Simulation(make_scheduler())
    run.add(make_sequence(0, 4))
    assert counts_of(run.step()) == [(0, 4)]
    for number in (1, 2, 3):
        run.add(make_sequence(number, 20))
    plan = run.step()
    assert plan is not None and counts_of(plan) == [(0, 1), (1, 20), (2, 11)]
    assert (plan.decode_tokens, plan.prefill_tokens) == (1, 31)
    assert counts_of(run.step()) == [(0, 1), (1, 1), (2, 9), (3, 20)]


def test_decodes_never_outnumber_the_budget() -> None:
    run = Simulation(make_scheduler(budget=2))
    for number in range(5):
        run.add(make_sequence(number, 1, limit=6))
    while run.lines:
        plan = run.step()
        assert plan is not None and len(plan.rows) == len({row.sequence for row in plan.rows}) <= 2
        assert run.steps < 40
    assert len(run.ended) == 5


def test_a_sequence_starts_only_while_the_running_ones_can_still_grow() -> None:
    run = Simulation(make_scheduler(3))
    for number in range(3):
        run.add(make_sequence(number, 10))
    assert counts_of(run.step()) == [(0, 10), (1, 10)], "the third page is for the first two"
    run.scheduler.check()


def test_a_draw_not_yet_collected_can_be_fed_in_the_very_next_step_only() -> None:
    scheduler = make_scheduler(10)
    scheduler.add(make_sequence(0, 4))
    scheduler.schedule(1, 0.0)
    scheduler.check()
    assert scheduler.schedule(3, 0.0) is None
    plan = scheduler.schedule(2, 0.0)
    assert plan is not None and plan.inputs.rows[0].tokens == [FROM_PREVIOUS] and plan.inputs.rows[0].position == 4
    scheduler.check()


def test_slots_closed_by_a_step_that_failed_are_closed_again_unless_they_are_in_use() -> None:
    run = Simulation(make_scheduler(10))
    scheduler = run.scheduler
    for number in (0, 1):
        run.add(make_sequence(number, 4, limit=1))
    run.step()
    run.add(make_sequence(2, 4))
    plan = scheduler.schedule(2, 0.0)
    assert plan is not None and plan.inputs.closed == [0, 1]
    used = plan.rows[0].sequence.slot
    again = scheduler.dispatch(3, scheduler.rewind(plan))
    assert again.inputs.closed == [1 - used] and [slot.slot for slot in again.inputs.opened] == [used]


def test_a_plan_names_the_requests_that_it_is_the_first_to_touch_once() -> None:
    run = Simulation(make_scheduler(budget=8))
    for number in range(3):
        run.add(make_sequence(number, 6))
    named = [plan.first_of for _ in range(6) if (plan := run.step())]
    assert sorted(chain(*named)) == [0, 1, 2] and named[0] == [0, 1]


# --- pages run out ---------------------------------------------------------------------------------------------------------------


def test_whoever_gives_up_its_pages_loses_its_row_of_the_same_step() -> None:
    """An older sequence in mid-prompt beside a younger that decodes."""
    run = Simulation(make_scheduler(7, budget=3, sharing=False))
    run.add(make_sequence(5, 3))
    for step in range(1, 100):
        if step == 29:
            run.add(make_sequence(1, 60))
        plan = run.step()
        if step >= 29 and 5 not in run.scheduler.running:
            assert counts_of(plan) == [(1, 3)], "the budget of the row that went is used"
            assert run.scheduler.preemptions == 1
            return
        assert counts_of(plan) == ([(5, 3 if step == 1 else 1)] if step < 29 else [(5, 1), (1, 2)])
    raise AssertionError("nobody gave way")


def test_the_youngest_waits_with_its_pages_and_gives_them_up_only_to_a_senior() -> None:
    run = Simulation(make_scheduler(3, budget=64))
    old, young = (run.add(make_sequence(number, PAGE_TOKENS)) for number in (0, 1))
    assert counts_of(run.step()) == [(0, 16), (1, 16)]
    for _ in range(PAGE_TOKENS):  # the old one fills the third page, the young one keeps its own
        assert counts_of(run.step()) == [(0, 1)]
        assert young.id in run.scheduler.running and young.computed == PAGE_TOKENS
    assert counts_of(run.step()) == [(0, 1)]
    run.scheduler.check()
    run.add(make_sequence(2, PAGE_TOKENS))
    assert [s.id for s in run.scheduler.waiting] == [1, 2], "a preempted sequence keeps its place"
    assert young.output_tokens == 1 and young.computed == 0 and young.lease is None
    assert old.output_tokens == 18


def test_a_preempted_sequence_opens_its_slot_again_with_the_output_so_far() -> None:
    run = Simulation(make_scheduler(3, budget=64))
    for number in (0, 1):
        run.add(make_sequence(number, PAGE_TOKENS, limit=PAGE_TOKENS + 2))
    opened = []
    while run.lines:
        plan = run.step()
        assert plan is not None
        slots = {row.sequence.slot: row.sequence.id for row in plan.rows}
        opened += [(slots[slot.slot], len(slot.output)) for slot in plan.inputs.opened if slot.slot in slots]
    assert opened == [(0, 0), (1, 0), (1, 1)]


def test_what_a_preempted_sequence_had_computed_is_not_computed_again_while_it_is_still_there() -> None:
    run = Simulation(make_scheduler(9, budget=100, sequences=2))
    low = run.add(make_sequence(0, 64, limit=30, priority="low"))
    other = run.add(make_sequence(1, 16, limit=30, priority="low"))
    run.step()
    run.add(make_sequence(2, 16, limit=8, priority="high"))
    assert dict(counts_of(run.step())) == {2: 16, 0: 1}, "the younger of the low ones gave its slot"
    while 2 in run.lines:
        run.step()
    plan = run.step()
    assert (1, 1) in counts_of(plan), "one token is left to compute: the page of its prompt was still cached"
    assert low.id in run.scheduler.running and other.id in run.scheduler.running
    while run.lines:
        run.step()
    assert run.scheduler.preemptions == 1


# --- priority classes ------------------------------------------------------------------------------------------------------------


def test_low_runs_only_in_what_the_others_leave() -> None:
    run = Simulation(make_scheduler(budget=32))
    run.add(make_sequence(0, 10, priority="low"))
    run.step()
    run.add(make_sequence(1, 60, priority="normal"))
    run.add(make_sequence(2, 40, priority="high"))
    assert counts_of(run.step()) == [(2, 32)]
    assert counts_of(run.step()) == [(2, 8), (1, 24)]
    assert counts_of(run.step()) == [(2, 1), (1, 31)]
    assert counts_of(run.step()) == [(2, 1), (1, 5), (0, 1)]


def test_a_high_request_takes_the_slot_of_a_low_one_but_not_of_its_own_class() -> None:
    run = Simulation(make_scheduler(budget=32, sequences=2))
    run.add(make_sequence(0, 8, priority="high"))
    run.add(make_sequence(1, 8, priority="low"))
    run.step()
    run.add(make_sequence(2, 8, priority="high"))
    run.add(make_sequence(3, 8, priority="high"))
    assert counts_of(run.step()) == [(0, 1), (2, 8)]
    assert [s.id for s in run.scheduler.waiting] == [1, 3]
    assert run.scheduler.preemptions == 1


def test_nobody_is_preempted_when_it_would_not_be_enough() -> None:
    run = Simulation(make_scheduler(6, budget=64))
    run.add(make_sequence(0, 60, limit=20, priority="high"))
    run.add(make_sequence(1, 8, limit=20, priority="low"))
    run.step()
    run.add(make_sequence(2, 60, limit=20, priority="high"))
    run.step()
    assert run.scheduler.preemptions == 0 and sorted(run.scheduler.running) == [0, 1]


# --- shared prefixes -------------------------------------------------------------------------------------------------------------


def test_a_second_request_starts_from_what_the_first_computed_to_the_token() -> None:
    run = Simulation(make_scheduler(budget=64))
    run.add(make_sequence(0, range(40), limit=3))
    run.step()
    run.add(second := make_sequence(1, [*range(37), 99, 98], limit=3))
    plan = run.step()
    assert plan is not None and counts_of(plan) == [(0, 1), (1, 2)]
    row = next(row for row in plan.inputs.rows if row.sequence == 1)
    assert row.position == 37 and len(plan.inputs.copies) == 1, "the last page is copied, two are shared"
    assert second.cached_tokens == 37 and run.scheduler.hit_tokens == 37


def test_whoever_shares_a_prompt_that_is_being_computed_waits_for_it() -> None:
    run = Simulation(make_scheduler(budget=32))
    for number in range(3):
        run.add(make_sequence(number, range(100), limit=4))
    run.add(make_sequence(3, 5))
    seen = [counts_of(run.step()) for _ in range(4)]
    assert seen[0] == [(0, 32)] and seen[1] == [(0, 32)] and seen[2] == [(0, 32)]
    assert seen[3] == [(0, 4), (1, 4), (2, 4), (3, 5)], "less than a page is not worth a wait"
    run.scheduler.check()


def test_nobody_waits_for_a_lower_class_nor_for_a_leader_that_stands_still() -> None:
    run = Simulation(make_scheduler(budget=32))
    run.add(make_sequence(0, range(100), priority="low"))
    run.step()
    run.add(make_sequence(1, range(100), priority="normal"))
    assert counts_of(run.step()) == [(1, 32)], "32 of its tokens are there, and it computes the others itself"
    run = Simulation(make_scheduler(budget=32))
    run.add(make_sequence(0, range(100), client="much served"))
    run.step()
    run.scheduler.policy.charge("much served", 100_000, run.now)
    run.add(make_sequence(1, range(100), client="a"))
    run.add(make_sequence(2, 1000, client="b"))
    assert counts_of(run.step()) == [(2, 32)]
    run.now += 1.5
    assert counts_of(run.step()) == [(1, 32)]


def test_when_the_leader_leaves_its_followers_go_on() -> None:
    run = Simulation(make_scheduler(budget=32))
    leader = run.add(make_sequence(0, range(100)))
    run.add(make_sequence(1, range(100)))
    run.step()
    run.end(leader)
    assert counts_of(run.step()) == [(1, 32)]
    assert run.lines[1].cached_tokens == 32


def test_a_window_gives_pages_back_while_a_long_prompt_goes_through() -> None:
    run = Simulation(make_scheduler([100, 4], layout=layout_of(None, 20), budget=16, sequences=4))
    run.add(make_sequence(0, 500))
    for _ in range(32):
        plan = run.step()
        assert plan is not None
        held = [page for page in plan.inputs.rows[0].pages[1] if page != NO_PAGE]
        assert len(held) == len(set(held)) <= 4
        run.scheduler.check()


# --- random schedules ------------------------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[Kind, ...]] = [(None,), (None, 1), (None, 20), (40,), ("state",), ("latent", None), (None, "state")]


class Schedule(RuleBasedStateMachine):
    """Requests come, steps run, sequences end or are taken away; pages, slots and the budget hold throughout."""

    @initialize(
        pages=st.integers(2, 14),
        budget=st.sampled_from([1, 3, 16, 64]),
        slots=st.integers(1, 5),
        kinds=st.sampled_from(LAYOUTS),
    )
    def start(self, pages: int, budget: int, slots: int, kinds: tuple[Kind, ...]) -> None:
        counts = [slots + 2 if kind == "state" else pages for kind in kinds]
        self.simulation = Simulation(make_scheduler(counts, layout=layout_of(*kinds), budget=budget, sequences=slots))
        self.kinds, self.budget, self.room, self.number = kinds, budget, pages * PAGE_TOKENS, 0

    @rule(
        prompt=st.integers(1, 60),
        limit=st.integers(1, 60),
        kind=st.integers(0, 3),
        client=st.sampled_from("ab"),
        priority=st.sampled_from(["high", "normal", "low"]),
    )
    def add(self, prompt: int, limit: int, kind: int, client: str, priority: str) -> None:
        """Of each kind prompts are prefixes of each other."""
        prompt = min(prompt, self.room)
        limit = min(limit, self.room - prompt + 1)
        tokens = [100 * kind + t for t in range(prompt)]
        sequence = make_sequence(self.number, tokens, limit, client=client, priority=priority)  # pyright: ignore[reportArgumentType]
        self.number += 1
        self.simulation.add(sequence)

    @rule()
    def run(self) -> None:
        before = {s.id: s.lease.computed for s in self.simulation.scheduler.running.values() if s.lease}
        busy = bool(self.simulation.lines)
        scheduler, simulation = self.simulation.scheduler, self.simulation
        simulation.steps += 1
        plan = scheduler.schedule(simulation.steps, simulation.now)
        assert (plan is not None) == busy, "there is work and nothing runs, or the reverse"
        if plan is not None:
            self._check(plan, before)
            simulation.settle(plan)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.simulation.lines:
            self.simulation.end(self.simulation.lines[data.draw(st.sampled_from(sorted(self.simulation.lines)))])

    @rule()
    def undo(self) -> None:
        """A step that failed: submitted, brought nothing."""
        simulation = self.simulation
        simulation.steps += 1
        if plan := simulation.scheduler.schedule(simulation.steps, simulation.now):
            assert simulation.scheduler.rewind(plan) == plan.rows
            assert all(row.sequence.scheduled == row.sequence.computed for row in plan.rows)

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.simulation.now += seconds
        self.simulation.scheduler.cache.expire(self.simulation.now)

    def _check(self, plan: Plan, before: dict[int, int]) -> None:
        rows = plan.inputs.rows
        assert 0 < sum(len(row.tokens) for row in rows) <= self.budget
        assert len({row.sequence for row in rows}) == len(rows)
        for row, planned in zip(rows, plan.rows, strict=True):
            sequence, end = planned.sequence, row.position + len(row.tokens)
            assert row.tokens == sequence.tokens[row.position : end]
            assert row.position == sequence.computed
            assert (row.sampling >= 0) == (end == len(sequence.tokens))
            self._check_pages(row.pages, row.position, end, rows, row.sequence)
        slots = [row.sampling for row in rows if row.sampling >= 0]
        assert len(slots) == len(set(slots))

    def _check_pages(self, pages: list[list[int]], start: int, end: int, rows: list, sequence: int) -> None:
        """What a row writes to is its own; what it reads is there."""
        for group, kind in enumerate(self.kinds):
            others = [page for row in rows if row.sequence != sequence for page in row.pages[group]]
            if kind == "state":
                assert len(pages[group]) == 1 and pages[group][0] not in others
                continue
            assert len(pages[group]) >= pages_for(end)
            written = pages[group][start // PAGE_TOKENS : pages_for(end)]
            assert NO_PAGE not in written and not set(written) & set(others), "two rows write to a page, or one reads it"

    @precondition(lambda self: hasattr(self, "simulation"))
    @invariant()
    def balances(self) -> None:
        scheduler = self.simulation.scheduler
        scheduler.check()
        waiting = [s.id for s in scheduler.waiting]
        assert sorted([*scheduler.running, *waiting]) == sorted(self.simulation.lines)


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(deadline=None, max_examples=80, stateful_step_count=60)


@settings(deadline=None, max_examples=50)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["high", "normal", "low"])), min_size=1, max_size=6),
    budget=st.sampled_from([1, 2, 16, 64]),
    pages=st.integers(6, 10),
    kinds=st.sampled_from(LAYOUTS),
)
def test_everybody_ends_and_the_most_senior_is_never_preempted(
    prompts: list[tuple[int, str]], budget: int, pages: int, kinds: tuple[Kind, ...]
) -> None:
    run = Simulation(make_scheduler(pages, layout=layout_of(*kinds), budget=budget))
    for number, (prompt, priority) in enumerate(prompts):
        run.add(make_sequence(number, prompt, 40, priority=priority))  # pyright: ignore[reportArgumentType]
    while run.lines:
        senior = min(run.lines.values(), key=seniority)
        before, ran = senior.computed, senior.lease is not None
        plan = run.step()
        assert plan is not None
        run.scheduler.check()
        if ran and senior.id in run.lines:
            assert senior.lease is not None and senior.computed >= before, "the most senior was preempted"
        assert run.steps < 20_000, "no end"
    assert len(run.ended) == len(prompts)
