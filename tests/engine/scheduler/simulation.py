"""A scheduler with a machine that exists only as a formula: steps take time, draws are new tokens, sequences end at their limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.cache.layout import CacheLayout
from engine.cache.manager import CacheManager
from engine.cache.radix import Namespace
from engine.scheduler.pacing import Pacing
from engine.scheduler.plan import Plan
from engine.scheduler.policy import Policy
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.types import EngineRequest, Priority
from tests.fixtures.scripted_executor import layout_of

NEVER_AGES = 1e9


def make_scheduler(
    pages: int | Seq[int] = 100,
    *,
    layout: CacheLayout | None = None,
    budget: int = 32,
    sequences: int = 8,
    aging_s: float = NEVER_AGES,
    target_ms: float = 1e9,
    sharing: bool = True,
) -> Scheduler:
    """Unpaced unless a target is given: a prompt takes whatever the budget leaves."""
    layout = layout or layout_of(None)
    counts = [pages] * len(layout.groups) if isinstance(pages, int) else pages
    pacing = Pacing(target_ms=target_ms, max_step_tokens=budget)
    if target_ms == 1e9:
        pacing._chunk = float(budget)
    return Scheduler(
        CacheManager(layout, counts, sharing=sharing),
        max_step_tokens=budget,
        max_sequences=sequences,
        policy=Policy(aging_s=aging_s),
        pacing=pacing,
    )


def make_sequence(
    number: int,
    prompt: int | Seq[int],
    limit: int = 100,
    *,
    client: str = "",
    priority: Priority = "normal",
    arrived: float = 0.0,
) -> Sequence:
    """A prompt given as a length is like no other sequence's."""
    tokens = [1000 * (number + 1) + t for t in range(prompt)] if isinstance(prompt, int) else list(prompt)
    request = EngineRequest(id=number, prompt=tokens, max_tokens=limit, client=client, priority=priority)
    return Sequence(number, request, 0, limit, Namespace(), arrived, tokens=list(tokens))


@dataclass
class Simulation:
    """`ms_of(plan)` is how long a step takes. `served` counts tokens by client, `ended` has when each sequence ended."""

    scheduler: Scheduler
    ms_of: Callable[[Plan], float] = lambda plan: 1.0
    now: float = 0.0
    steps: int = 0
    served: Counter[str] = field(default_factory=Counter)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    lines: dict[int, Sequence] = field(default_factory=dict)

    def add(self, sequence: Sequence) -> Sequence:
        self.lines[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan | None:
        self.steps += 1
        plan = self.scheduler.schedule(self.steps, self.now)
        if plan is None:
            return None
        ms = self.ms_of(plan)
        self.now += ms / 1e3
        self.scheduler.pacing.observe(ms, plan.decode_tokens, plan.prefill_tokens)
        self.settle(plan)
        return plan

    def settle(self, plan: Plan) -> None:
        for row in plan.rows:
            sequence = row.sequence
            self.served[sequence.request.client] += row.count
            self.started.setdefault(sequence.id, self.now)
            if row.live:
                self.scheduler.confirm(row, self.now)
                if row.draws:
                    sequence.tokens.append(7 * sequence.id + len(sequence.tokens))
                    if sequence.output_tokens >= sequence.limit:
                        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence, self.now)
        self.ended[sequence.id] = self.now
        del self.lines[sequence.id]


def counts_of(plan: Plan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return [(row.sequence.id, row.count) for row in plan.rows]
