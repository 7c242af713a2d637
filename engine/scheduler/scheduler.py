"""Decides what each step computes: who runs, with how many tokens, in which pages and sampling slots.

Every step has a budget of tokens. Decodes of high and normal priority go first, then prompts and whoever may start, in chunks, in
the order of the policy; low priority has what is left. A sequence starts from the longest prefix that the cache holds, and waits a
little when a running one is about to compute more of it. Pages are taken as a sequence grows. When they run out, the lowest and
youngest gives way: its pages stay cached until they are needed, and it is computed again from what is left of them.
Owns leases and slots; knows nothing of token meaning, stop rules or the executor. Invariants: waiting sequences hold neither a
lease nor a slot; the most senior running sequence is never preempted, so somebody always moves on and everybody ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.manager import CacheManager
from engine.runtime.batch import PAGE_TOKENS, Row, SamplingSlot, StepInputs
from engine.scheduler.pacing import Pacing
from engine.scheduler.plan import Plan, PlannedRow, row_of
from engine.scheduler.policy import LOW, Policy, rank, seniority
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import NO_SLOT, Sequence
from engine.speculative.adaptive import Speculation, Wish
from engine.speculative.tree import DraftTree

LEADER_STALLS_S = 1.0  # nobody waits for a prefix whose computer has got nothing for so long


class _Step:
    """The step being planned: what it has room for, and who got how many tokens of it."""

    def __init__(self, number: int, now: float, left: int) -> None:
        self.number, self.now, self.left = number, now, left
        self.counts: dict[Sequence, int] = {}

    def give(self, sequence: Sequence, count: int) -> None:
        self.counts[sequence] = count
        self.left -= count

    def take_back(self, sequence: Sequence) -> None:
        self.left += self.counts.pop(sequence, 0)


class Scheduler:
    def __init__(
        self,
        cache: CacheManager,
        *,
        max_step_tokens: int,
        max_sequences: int,
        policy: Policy,
        pacing: Pacing,
        speculation: Speculation | None = None,
    ) -> None:
        self.cache = cache
        self.policy = policy
        self.pacing = pacing
        self.speculation = speculation
        self.running: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.preemptions = 0
        self.hit_tokens = 0
        self._max_step_tokens = max_step_tokens
        self._max_sequences = max_sequences
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._unclosed: set[int] = set()  # freed slots that the executor has not been told of

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence, now: float, *, failed: bool = False) -> None:
        """Forget a sequence that ended. What it computed stays cached, unless it `failed`; rows in flight become worthless."""
        if sequence.id in self.running:
            self._stop_running(sequence, now, failed=failed)
        else:
            self.waiting.remove(sequence)
            sequence.epoch += 1

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take pages and slot from a running sequence, which waits for its next turn with all its tokens."""
        self._stop_running(sequence, now)
        self.waiting.push(sequence)
        self.preemptions += 1

    def schedule(self, number: int, now: float) -> Plan | None:
        """The next step, its tokens marked as scheduled; None when nothing can run (nothing is left, or all is in flight)."""
        self.policy.age([*self.running.values(), *self.waiting], now)
        ready = [sequence for sequence in self.running.values() if sequence.pending(number)]
        urgent = [sequence for sequence in ready if rank(sequence) < LOW]
        urgent_waiting = [sequence for sequence in self.waiting if rank(sequence) < LOW]
        decodes = _decodes(urgent if urgent or urgent_waiting else ready, number)
        step = _Step(number, now, min(self._max_step_tokens, len(decodes) + self.pacing.budget(len(decodes))))
        self._serve(step, urgent, urgent_waiting)
        low_waiting = [sequence for sequence in self.waiting if rank(sequence) == LOW]
        self._serve(step, [sequence for sequence in ready if rank(sequence) == LOW], low_waiting)
        if not step.counts:
            return None
        drafts = self._drafts(step)
        rows = [self._planned(sequence, count, drafts.get(sequence.id)) for sequence, count in step.counts.items()]
        plan = self.dispatch(number, rows)
        for row in rows:
            self._served(row, now)
        return plan

    def dispatch(self, number: int, rows: list[PlannedRow]) -> Plan:
        """Inputs for `rows`, whose pages are in hand, and the sequences moved on as if the step had been submitted."""
        opened: list[SamplingSlot] = []
        built: list[Row] = []
        copies: list[tuple[int, int, int]] = []
        for row in rows:
            sequence = row.sequence
            assert sequence.lease is not None
            copies += self.cache.begin(sequence.lease, row.start)
            if row.draws and not sequence.slot_open:
                opened.append(sequence.sampling_slot())
                sequence.slot_open = True
            built.append(row_of(row))
            sequence.scheduled += row.count
            if row.draws:
                sequence.in_flight += 1
                sequence.drawn_in = number
        closed = sorted(self._unclosed)
        self._unclosed.clear()
        first_of = [row.sequence.request.id for row in rows if row.sequence.first_scheduled is None]
        inputs = StepInputs(step=number, rows=built, opened=opened, closed=closed, copies=copies)
        return Plan(rows, inputs, list(dict.fromkeys(first_of)))

    def confirm(self, row: PlannedRow, now: float, accepted: int = 0) -> None:
        """The row's tokens, and `accepted` of its drafts, are in the cache for others to share. Pages not needed go back."""
        sequence = row.sequence
        assert sequence.lease is not None
        sequence.computed += row.count + accepted
        sequence.scheduled += accepted
        sequence.in_flight -= row.draws
        self.cache.confirm(sequence.lease, sequence.computed, now)
        if row.draft:
            self.cache.shrink(sequence.lease, sequence.scheduled)
            self.policy.charge(sequence.request.client, accepted, now)

    def observe(self, plan: Plan, ms: float) -> None:
        """A step as planned took `ms`."""
        answers = plan.decode_tokens + plan.drafted_tokens
        self.pacing.observe(ms, answers, plan.prefill_tokens)
        if self.speculation and answers and not plan.prefill_tokens:
            self.speculation.observe(answers, ms)

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
        leases = [sequence.lease for sequence in self.running.values()]
        self.cache.check(lease for lease in leases if lease is not None)
        slots = [sequence.slot for sequence in self.running.values()]
        assert sorted(slots + self._free_slots) == list(range(self._max_sequences)), "sampling slots do not add up"
        for sequence in self.running.values():
            assert sequence.lease is not None, "a running sequence holds no lease"
            assert sequence.computed <= sequence.scheduled, "more is computed than was scheduled"
            draws = max(0, sequence.scheduled - len(sequence.tokens) + 1)
            assert sequence.in_flight == draws, f"{sequence.in_flight} draws in flight, not {draws}"
            assert sequence.scheduled <= sequence.lease.capacity, "a token is scheduled without a page"
        for sequence in self.waiting:
            assert sequence.slot == NO_SLOT and sequence.lease is None, "a waiting sequence holds a lease or a slot"
            assert sequence.id not in self.running, "a sequence both waits and runs"

    # --- who runs ------------------------------------------------------------------------------------------------------------

    def _serve(self, step: _Step, ready: list[Sequence], waiting: list[Sequence]) -> None:
        """Give tokens to running sequences with something to feed, decodes first, and to waiting ones that may start."""
        decodes = _decodes(ready, step.number)
        turns = self.policy.turns(decodes, step.now)
        for sequence in turns:
            turns.gave(self._place(sequence, step))
        decoding = set(decodes)
        prompts = [sequence for sequence in ready if sequence not in decoding]
        turns = self.policy.turns([*prompts, *waiting], step.now)
        starting = True  # until one finds no room: whoever comes behind it may not take what it waits for
        for sequence in turns:
            if step.left <= 0:
                return
            if sequence in self.waiting:
                if not starting or self._follows(sequence, step.now):
                    continue
                starting = self._start(sequence, step)
                if not starting:
                    continue
            turns.gave(self._place(sequence, step))

    def _place(self, sequence: Sequence, step: _Step) -> int:
        """Give `sequence` as many tokens of this step as budget and pages allow, taking pages from juniors if it gets none."""
        lease = sequence.lease
        if lease is None:  # it gave way a moment ago
            return 0
        stop = self.cache.next_stop(lease, sequence.scheduled)
        while step.left > 0:
            want = min(sequence.pending(step.number), step.left)
            if stop is not None:
                want = min(want, stop - sequence.scheduled)
            count = min(want, self.cache.room(lease) - sequence.scheduled)
            if count > 0:
                self.cache.extend(lease, sequence.scheduled + count)
                step.give(sequence, count)
                return count
            junior = max(self.running.values(), key=seniority)
            if junior is sequence:
                return 0
            step.take_back(junior)
            self.preempt(junior, step.now)
        return 0

    # --- starting ------------------------------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence, step: _Step) -> bool:
        """Let `sequence` run, if slots and pages allow: its own, and a page more for each of the others to grow."""
        if not self._fits(sequence) and not self._make_way(sequence, step):
            return False
        request = sequence.request
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        sequence.lease = lease = self.cache.open(
            sequence.namespace,
            sequence.tokens,
            retention=request.retention,
            pin=request.pin,
            prompt_tokens=sequence.prompt_tokens,
            now=step.now,
        )
        sequence.computed = sequence.scheduled = lease.hit
        sequence.slot = self._free_slots.pop()
        sequence.leader = None
        return True

    def _fits(self, sequence: Sequence) -> bool:
        """Whoever would run alone just starts: it may even have to go through a window in chunks."""
        if not self._free_slots:
            return False
        return not self.running or self.cache.can_start(sequence.namespace, sequence.tokens, len(self.running))

    def _make_way(self, sequence: Sequence, step: _Step) -> bool:
        """Preempt sequences of a lower class until `sequence` fits; nobody, when that would not be enough."""
        juniors = sorted((s for s in self.running.values() if rank(s) > rank(sequence)), key=seniority)
        if not self._would_fit(sequence, juniors):
            return False
        while not self._fits(sequence):
            if not juniors:
                return False
            step.take_back(juniors[-1])
            self.preempt(juniors.pop(), step.now)
        return True

    def _would_fit(self, sequence: Sequence, juniors: list[Sequence]) -> bool:
        if not juniors:
            return False
        spare = len(self.running) - len(juniors)
        back = self.cache.given_back(s.lease for s in juniors if s.lease is not None)
        return self.cache.can_start(sequence.namespace, sequence.tokens, spare - back)

    def _follows(self, sequence: Sequence, now: float) -> bool:
        """Whether it is better to wait, because a running sequence computes a prefix of this one that the cache lacks."""
        leader = sequence.leader
        if leader is None or not _leads(leader, sequence.leader_tokens, now):
            sequence.leader = leader = self._find_leader(sequence, now)
        return leader is not None

    def _find_leader(self, sequence: Sequence, now: float) -> Sequence | None:
        cached: int | None = None
        for other in self.running.values():
            if other.computed >= other.prompt_tokens or other.namespace != sequence.namespace or rank(other) > rank(sequence):
                continue
            if cached is None:
                cached = self.cache.probe(sequence.namespace, sequence.tokens)
            shared = min(_shared(other.request.prompt, sequence.tokens), len(sequence.tokens) - 1)
            if shared - cached >= PAGE_TOKENS and _leads(other, shared, now):
                sequence.leader_tokens = shared
                return other
        return None

    def _stop_running(self, sequence: Sequence, now: float, *, failed: bool = False) -> None:
        assert sequence.lease is not None
        del self.running[sequence.id]
        if failed:
            self.cache.discard(sequence.lease)
        else:
            self.cache.close(sequence.lease, now, settled=sequence.settled)
        self._free_slots.append(sequence.slot)
        self._unclosed.add(sequence.slot)
        sequence.lease = None
        sequence.slot = NO_SLOT
        sequence.slot_open = False
        sequence.computed = sequence.scheduled = sequence.in_flight = 0
        sequence.epoch += 1

    # --- drafts --------------------------------------------------------------------------------------------------------------

    def _drafts(self, step: _Step) -> dict[int, DraftTree]:
        """What is drafted for the answers of this step, in the room that it and the pages at hand leave."""
        if self.speculation is None:
            return {}
        given = sum(step.counts.values())
        decodes = [s for s, count in step.counts.items() if count == 1 and s.output_tokens and s.scheduled == len(s.tokens) - 1]
        wishes = [Wish(s.id, s.tokens, self._draft_room(s)) for s in decodes if s.request.speculation]
        trees = self.speculation.plan(wishes, len(decodes), given, self._max_step_tokens - given)
        for sequence in decodes:
            if (tree := trees.get(sequence.id)) and (lease := sequence.lease):
                fits = tree.first(self.cache.room(lease) - sequence.scheduled - 1)
                self.cache.extend(lease, sequence.scheduled + 1 + len(fits))
                trees[sequence.id] = fits
        return {sequence: tree for sequence, tree in trees.items() if len(tree)}

    def _draft_room(self, sequence: Sequence) -> int:
        """Nodes at most: a step brings one token more than drafts that were right."""
        assert sequence.lease is not None
        return min(sequence.limit - sequence.output_tokens, self.cache.room(sequence.lease) - sequence.scheduled) - 1

    # --- rows ----------------------------------------------------------------------------------------------------------------

    def _served(self, row: PlannedRow, now: float) -> None:
        sequence = row.sequence
        sequence.last_served = now
        self.policy.charge(sequence.request.client, row.count, now)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            sequence.cached_tokens = row.start
            self.hit_tokens += row.start

    def _planned(self, sequence: Sequence, count: int, draft: DraftTree | None) -> PlannedRow:
        start = sequence.scheduled
        draws = start + count >= len(sequence.tokens)
        decode = count == 1 and draws and sequence.output_tokens + sequence.in_flight > 0
        return PlannedRow(sequence, sequence.epoch, start, count, draws, decode, draft)


def _decodes(sequences: Iterable[Sequence], number: int) -> list[Sequence]:
    """Those that feed one token and draw the next."""
    return [sequence for sequence in sequences if sequence.pending(number) == 1 and sequence.scheduled >= len(sequence.tokens) - 1]


def _leads(leader: Sequence, tokens: int, now: float) -> bool:
    """Whether `leader` is on its way to have computed `tokens` tokens."""
    return leader.lease is not None and leader.computed < tokens and now - leader.last_served < LEADER_STALLS_S


def _shared(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same, found by bisection: slices compare fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
