"""Time between two tokens of a running stream while long prompts arrive, against the same stream alone.

A run: the stream decodes alone; a first prompt comes, to which the engine adapts its chunks (told apart); the stream decodes alone;
the long prompt comes; the stream decodes alone. Gaps count from a prompt's arrival to its first token. Variants differ in the
target time that chunks are cut for: one no machine reaches, so that chunks are the shortest there are; the real ones; and none, so
that chunks grow to all that a step may take. A target is out of reach where a decode step alone takes longer, or one with the
shortest chunk does: then the figures say how far off it is.
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

ALLOWED = 1.5  # p95 over the target

Gaps = list[float]


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    option_ms: float  # what the engine is told
    target_ms: float | None  # what is judged


SHORTEST = Variant("shortest chunks", 1e-3, None)
NO_TARGET = Variant("no target", 1e9, None)
VARIANTS = (SHORTEST, *(Variant(f"{target:g} ms", target, target) for target in (50.0, 100.0, 200.0)), NO_TARGET)


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
    variant: str
    target_ms: float | None  # None: nothing to reach
    alone_ms: Tail
    beside_ms: Tail  # while the long prompt is computed
    beside_p95_ms: Spread  # of each run
    adapting_ms: Tail  # while the first prompt after the start is computed
    decode_reaches: bool | None  # whether a decode step alone is shorter than the target (medians)
    chunks_reach: bool | None  # whether one with the shortest chunk is
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
    _run(subject, sizes, NO_TARGET, seed, "warm-up")
    runs: dict[Variant, list[_Run]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for variant in in_turn(VARIANTS, number):
            runs[variant].append(_run(subject, sizes, variant, seed, number))
    shortest_ms = tail([gap for run in runs[SHORTEST] for gap in run.beside]).p50
    return Latency(
        stream_prompt_tokens=sizes.stream_prompt_tokens,
        first_prompt_tokens=sizes.first_prompt_tokens,
        long_prompt_tokens=sizes.long_prompt_tokens,
        max_step_tokens=MAX_STEP_TOKENS,
        allowed=ALLOWED,
        rounds=rounds,
        warmup_runs=1,
        rows=[_row(variant, of_variant, shortest_ms) for variant, of_variant in runs.items()],
    )


def _run(subject: Subject, sizes: Sizes, variant: Variant, seed: int, number: object) -> _Run:
    def prompt(count: int, name: str) -> list[int]:
        return workloads.prompt(count, subject.vocab_size, seed, "latency", number, name)

    drive = subject.drive(EngineOptions(target_step_ms=variant.option_ms))
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


def _row(variant: Variant, runs: list[_Run], shortest_ms: float) -> Row:
    """`shortest_ms` is the median of a step with the shortest chunk."""
    target_ms = variant.target_ms
    alone = tail([gap for run in runs for gap in run.alone])
    beside = tail([gap for run in runs for gap in run.beside])
    return Row(
        variant=variant.name,
        target_ms=target_ms,
        alone_ms=alone,
        beside_ms=beside,
        beside_p95_ms=spread([tail(run.beside).p95 for run in runs]),
        adapting_ms=tail([gap for run in runs for gap in run.adapting]),
        decode_reaches=None if target_ms is None else alone.p50 < target_ms,
        chunks_reach=None if target_ms is None else shortest_ms < target_ms,
        p95_over_target=None if target_ms is None else beside.p95 / target_ms,
        within_allowance=None if target_ms is None else beside.p95 <= ALLOWED * target_ms,
        first_token_ms=spread([run.first_token_ms for run in runs]),
        chunk_tokens=spread([chunk for run in runs for chunk in run.chunks]),
        stream_tokens=sum(run.tokens for run in runs),
    )


def table(result: Latency) -> Table:
    columns = ("target", "alone p50", "p95", "beside p50", "p95", "p99", "max", "p95/target", "first token ms", "chunk tokens")
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
        row.variant,
        *map(one, (row.alone_ms.p50, row.alone_ms.p95, beside.p50, beside.p95, beside.p99, beside.most)),
        "-" if row.p95_over_target is None else f"{row.p95_over_target:.2f}",
        figure(row.first_token_ms, 0),
        figure(row.chunk_tokens, 0),
    )


def _verdict(row: Row) -> str:
    where = f"target {row.variant}:"
    if not row.decode_reaches:
        return f"{where} out of reach here, a decode step alone takes {row.alone_ms.p50:.1f} ms"
    if not row.chunks_reach:
        return f"{where} out of reach beside a long prompt here, even the shortest chunks make a step longer (first line)"
    return f"{where} p95 {'within' if row.within_allowance else 'ABOVE'} {ALLOWED} times the target"
