"""Time between two tokens of a running stream while long prompts arrive, against the same stream alone.

A run: the stream decodes alone; a first prompt comes, to which the engine adapts its chunks (told apart); the stream decodes alone;
the long prompt comes; the stream decodes alone. Variants differ in the target time that chunks are cut for; the last has none, so
that chunks grow to all that a step may take. A machine whose decode step alone is longer than a target cannot reach it: then the
figures say how far off it is. Gaps count from a prompt's arrival to its first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.bench import workloads
from engine.bench.drive import Drive, Stream
from engine.bench.subject import MAX_STEP_TOKENS, Subject
from engine.bench.table import Table, figure, one
from engine.bench.timing import Spread, Tail, in_turn, spread, tail
from engine.built import EngineOptions

TARGETS_MS = (50.0, 100.0, 200.0, None)  # None: no target
NO_TARGET_MS = 1e9
ALLOWED = 1.5  # p95 over the target

Gaps = list[float]


@dataclass(frozen=True, slots=True)
class Sizes:
    stream_prompt_tokens: int = 32
    alone_tokens: int = 48  # each time
    first_prompt_tokens: int = 1200  # enough for chunks without a target to grow to a whole step
    long_prompt_tokens: int = 4000

    def within(self, context_tokens: int) -> Sizes:
        """Prompts short enough for the context, and the stream with room to go on."""
        first = min(self.first_prompt_tokens, context_tokens // 4)
        long = min(self.long_prompt_tokens, context_tokens // 2)
        return Sizes(self.stream_prompt_tokens, self.alone_tokens, first, long)


QUICK = Sizes(alone_tokens=12, first_prompt_tokens=600, long_prompt_tokens=1000)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    target_ms: float | None  # None: chunks of all that a step may take
    alone_ms: Tail
    beside_ms: Tail  # while the long prompt is computed
    beside_p95_ms: Spread  # of each run
    adapting_ms: Tail  # while the first prompt after the start is computed
    reachable: bool | None  # whether a decode step alone is shorter than the target
    p95_over_target: float | None
    within_allowance: bool | None  # p95 at most ALLOWED times the target
    first_token_ms: Spread  # of the long prompts
    chunk_tokens: Spread  # prompt tokens of each step beside the stream
    stream_tokens: int  # in all runs


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    stream_prompt_tokens: int
    first_prompt_tokens: int
    long_prompt_tokens: int
    max_step_tokens: int
    allowed: float
    rounds: int
    warmup_runs: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Run:
    alone: Gaps
    adapting: Gaps
    beside: Gaps
    first_token_ms: float
    chunks: list[float]
    tokens: int


def measure(subject: Subject, sizes: Sizes, rounds: int, seed: int, say: Callable[[str], object]) -> Latency:
    sizes = sizes.within(subject.context_tokens)
    _run(subject, sizes, TARGETS_MS[0], seed, "warm-up")
    runs: dict[float | None, list[_Run]] = {target: [] for target in TARGETS_MS}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for target in in_turn(TARGETS_MS, number):
            runs[target].append(_run(subject, sizes, target, seed, number))
    return Latency(
        stream_prompt_tokens=sizes.stream_prompt_tokens,
        first_prompt_tokens=sizes.first_prompt_tokens,
        long_prompt_tokens=sizes.long_prompt_tokens,
        max_step_tokens=MAX_STEP_TOKENS,
        allowed=ALLOWED,
        rounds=rounds,
        warmup_runs=1,
        rows=[_row(target, of_target) for target, of_target in runs.items()],
    )


def _run(subject: Subject, sizes: Sizes, target_ms: float | None, seed: int, number: object) -> _Run:
    def prompt(count: int, name: str) -> list[int]:
        return workloads.prompt(count, subject.vocab_size, seed, "latency", number, name)

    drive = subject.drive(EngineOptions(target_step_ms=target_ms or NO_TARGET_MS))
    length = subject.context_tokens - sizes.stream_prompt_tokens
    stream = drive.add(prompt(sizes.stream_prompt_tokens, "stream"), length)
    drive.until_tokens(stream, 1)
    alone = _alone(drive, stream, sizes.alone_tokens)
    adapting, _ = _beside(drive, stream, prompt(sizes.first_prompt_tokens, "first"))
    alone += _alone(drive, stream, sizes.alone_tokens)
    steps = len(drive.steps)
    beside, long = _beside(drive, stream, prompt(sizes.long_prompt_tokens, "long"))
    chunks = [float(step.prefill_tokens) for step in drive.steps[steps:]]
    alone += _alone(drive, stream, sizes.alone_tokens)
    drive.stop(stream)
    return _Run(alone, adapting, beside, long.first_token_ms, chunks, len(stream.times))


def _alone(drive: Drive, stream: Stream, count: int) -> Gaps:
    """The next `count` gaps of `stream`, which nothing else runs beside."""
    before = len(stream.times)
    drive.until_tokens(stream, before + count)
    return stream.gaps_ms[before - 1 :]


def _beside(drive: Drive, stream: Stream, prompt: list[int]) -> tuple[Gaps, Stream]:
    """The gaps of `stream` until `prompt`, which arrives now, has its only token."""
    before = len(stream.times)
    other = drive.add(prompt, 1)
    drive.until_tokens(other, 1)
    if stream.finish:
        raise RuntimeError("the stream ended while the prompt beside it was computed")
    return stream.gaps_ms[before - 1 :], other


def _row(target_ms: float | None, runs: list[_Run]) -> Row:
    alone = tail([gap for run in runs for gap in run.alone])
    beside = tail([gap for run in runs for gap in run.beside])
    return Row(
        target_ms=target_ms,
        alone_ms=alone,
        beside_ms=beside,
        beside_p95_ms=spread([tail(run.beside).p95 for run in runs]),
        adapting_ms=tail([gap for run in runs for gap in run.adapting]),
        reachable=None if target_ms is None else alone.p50 < target_ms,
        p95_over_target=None if target_ms is None else beside.p95 / target_ms,
        within_allowance=None if target_ms is None else beside.p95 <= ALLOWED * target_ms,
        first_token_ms=spread([run.first_token_ms for run in runs]),
        chunk_tokens=spread([chunk for run in runs for chunk in run.chunks]),
        stream_tokens=sum(run.tokens for run in runs),
    )


def table(result: Latency) -> Table:
    columns = ("target ms", "alone p50", "p95", "beside p50", "p95", "p99", "max", "p95/target", "first token ms", "chunk tokens")
    return Table(
        f"Inter-token ms of a stream beside a prompt of {result.long_prompt_tokens} tokens "
        f"({result.rounds} rounds; first prompt of {result.first_prompt_tokens} tokens not counted)",
        columns,
        [_cells(row) for row in result.rows],
        [_verdict(row) for row in result.rows if row.target_ms is not None],
    )


def _cells(row: Row) -> tuple[str, ...]:
    beside = row.beside_ms
    return (
        "none" if row.target_ms is None else f"{row.target_ms:.0f}",
        *map(one, (row.alone_ms.p50, row.alone_ms.p95, beside.p50, beside.p95, beside.p99, beside.most)),
        "-" if row.p95_over_target is None else f"{row.p95_over_target:.2f}",
        figure(row.first_token_ms, 0),
        figure(row.chunk_tokens, 0),
    )


def _verdict(row: Row) -> str:
    where = f"target {row.target_ms:.0f} ms:"
    if not row.reachable:
        return f"{where} out of reach here, a decode step alone takes {row.alone_ms.p50:.1f} ms"
    return f"{where} p95 {'within' if row.within_allowance else 'ABOVE'} {ALLOWED} times the target"
