"""Decides what each step computes: who runs, with how many tokens, in which pages and sampling slots.

Every step has a budget of tokens. Decodes go first, then prompts, oldest first, in chunks; waiting sequences join while their known
tokens fit. Pages are taken as a sequence grows. When they run out, the youngest gives back all of its own and is computed again
later; a sequence that is itself the youngest waits a step. So the oldest always moves, and everybody ends.
Owns pages and slots; knows nothing of token meaning, stop rules or the executor. Invariant: every running sequence is older than
every waiting one, and waiting ones hold neither pages nor slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.blocks import BlockAllocator
from engine.runtime.batch import FROM_PREVIOUS, Row, SamplingSlot, StepInputs
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import NO_SLOT, Sequence


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """`count` new tokens of a sequence from `start` on, and whether a draw follows them."""

    sequence: Sequence
    epoch: int
    start: int
    count: int
    draws: bool
    decode: bool  # the next token of a running answer, not part of a prompt or a recomputation

    @property
    def live(self) -> bool:
        """Whether the sequence still wants what this row brings."""
        return self.epoch == self.sequence.epoch


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows, and the inputs made of them."""

    rows: list[PlannedRow]
    inputs: StepInputs

    @property
    def decode_tokens(self) -> int:
        return sum(row.count for row in self.rows if row.decode)

    @property
    def prefill_tokens(self) -> int:
        return sum(row.count for row in self.rows if not row.decode)


class Scheduler:
    def __init__(self, blocks: BlockAllocator, *, max_step_tokens: int, max_sequences: int) -> None:
        self.blocks = blocks
        self.running: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self._max_step_tokens = max_step_tokens
        self._max_sequences = max_sequences
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._unclosed: set[int] = set()  # freed slots that the executor has not been told of

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended. Its pages are free at once; rows in flight become worthless."""
        if sequence.id in self.running:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
            sequence.epoch += 1

    def schedule(self, step: int, now: float) -> Plan | None:
        """The next step, its tokens marked as scheduled; None when nothing can run (nothing is left, or all is in flight)."""
        counts: dict[Sequence, int] = {}
        for sequence in self._in_turn(step):
            if sequence.id in self.running:  # not preempted a moment ago
                self._place(sequence, step, counts)
        while sequence := self._admissible(counts):
            self._admit(sequence, now)
            self._place(sequence, step, counts)
        if not counts:
            return None
        return self.dispatch(step, [self._planned(sequence, count) for sequence, count in counts.items()])

    def dispatch(self, step: int, rows: list[PlannedRow]) -> Plan:
        """Inputs for `rows`, whose pages are in hand, and the sequences moved on as if the step had been submitted."""
        opened: list[SamplingSlot] = []
        built: list[Row] = []
        for row in rows:
            sequence = row.sequence
            if row.draws and not sequence.slot_open:
                opened.append(sequence.sampling_slot())
                sequence.slot_open = True
            built.append(self._row(row))
            sequence.scheduled += row.count
            if row.draws:
                sequence.in_flight += 1
                sequence.drawn_in = step
        closed = sorted(self._unclosed)
        self._unclosed.clear()
        return Plan(rows, StepInputs(step=step, rows=built, opened=opened, closed=closed))

    def confirm(self, row: PlannedRow) -> None:
        """The row's tokens are in the cache. Pages that fell out of a window go back."""
        sequence = row.sequence
        sequence.computed += row.count
        sequence.in_flight -= row.draws
        self.blocks.trim(sequence.table, sequence.computed)

    def rewind(self, plan: Plan) -> list[PlannedRow]:
        """Undo the submission of `plan`, which brought nothing: the rows still wanted, to be dispatched again if the caller likes.

        Sampling state at the executor may have moved, so every slot is opened anew; closing again is harmless.
        """
        self._unclosed.update(slot for slot in plan.inputs.closed if slot in self._free_slots)
        rows = [row for row in plan.rows if row.live]
        for row in rows:
            sequence = row.sequence
            sequence.scheduled = sequence.computed
            sequence.in_flight = 0
            sequence.slot_open = False
        return rows

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and queues add up."""
        self.blocks.check(sequence.table for sequence in self.running.values())
        slots = [sequence.slot for sequence in self.running.values()]
        assert sorted(slots + self._free_slots) == list(range(self._max_sequences)), "sampling slots do not add up"
        for sequence in self.running.values():
            assert sequence.computed <= sequence.scheduled, "more is computed than was scheduled"
            draws = max(0, sequence.scheduled - len(sequence.tokens) + 1)
            assert sequence.in_flight == draws, f"{sequence.in_flight} draws in flight, not {draws}"
            assert sequence.scheduled <= sequence.table.tokens, "a token is scheduled without a page"
        for sequence in self.waiting:
            assert sequence.slot == NO_SLOT and not sequence.table.tokens, "a waiting sequence holds pages or a slot"
        order = [*sorted(self.running), *(sequence.id for sequence in self.waiting)]
        assert order == sorted(set(order)), "a waiting sequence is older than a running one, or in both places"

    # --- who runs ------------------------------------------------------------------------------------------------------------

    def _in_turn(self, step: int) -> list[Sequence]:
        """Running sequences with something to feed, decodes first, then by age.

        Decodes never outnumber the budget: a sequence joins only in what the decodes leave of it.
        """
        ready = [sequence for sequence in self.running.values() if sequence.pending(step)]
        return sorted(ready, key=lambda sequence: (sequence.pending(step) > 1, sequence.id))

    def _admissible(self, counts: dict[Sequence, int]) -> Sequence | None:
        """The oldest waiting sequence, if it may start: budget and slot left, its tokens fit, the others can still grow a page."""
        sequence = self.waiting.first()
        if sequence is None or not self._free_slots or sum(counts.values()) >= self._max_step_tokens:
            return None
        fits = self.blocks.can_start(len(sequence.tokens), spare=len(self.running))
        return sequence if fits or not self.running else None

    def _admit(self, sequence: Sequence, now: float) -> None:
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        sequence.slot = self._free_slots.pop()
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now

    # --- pages ---------------------------------------------------------------------------------------------------------------

    def _place(self, sequence: Sequence, step: int, counts: dict[Sequence, int]) -> None:
        """Give `sequence` as many tokens of this step as budget and pages allow, taking pages from younger ones if it gets none."""
        want = min(sequence.pending(step), self._max_step_tokens - sum(counts.values()))
        while want > 0:
            count = min(want, self.blocks.room(sequence.table) - sequence.scheduled)
            if count > 0:
                self.blocks.extend(sequence.table, sequence.scheduled + count)
                counts[sequence] = count
                return
            youngest = self.running[max(self.running)]
            if youngest is sequence:
                return
            counts.pop(youngest, None)
            self._stop_running(youngest)
            self.waiting.push(youngest)

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.blocks.release(sequence.table)
        self._free_slots.append(sequence.slot)
        self._unclosed.add(sequence.slot)
        sequence.slot = NO_SLOT
        sequence.slot_open = False
        sequence.computed = sequence.scheduled = sequence.in_flight = 0
        sequence.epoch += 1

    # --- rows ----------------------------------------------------------------------------------------------------------------

    def _planned(self, sequence: Sequence, count: int) -> PlannedRow:
        start = sequence.scheduled
        draws = start + count >= len(sequence.tokens)
        decode = count == 1 and draws and sequence.output_tokens + sequence.in_flight > 0
        return PlannedRow(sequence, sequence.epoch, start, count, draws, decode)

    def _row(self, row: PlannedRow) -> Row:
        sequence = row.sequence
        return Row(
            sequence=sequence.id,
            tokens=sequence.tokens[row.start : row.start + row.count] or [FROM_PREVIOUS],
            position=row.start,
            pages=[list(pages) for pages in sequence.table.pages],
            sampling=sequence.slot if row.draws else -1,
        )
