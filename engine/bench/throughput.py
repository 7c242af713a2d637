"""Tokens per second of 1 to 32 sequences that decode together: what a step of more rows costs more.

All prompts of a run are fed in its first step, so every later step decodes all sequences at once: one run gives steps of one kind.
The numbers of sequences take turns, and a ratio is taken within its round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.bench import workloads
from engine.bench.subject import WIDEST_STEP_TOKENS, Subject
from engine.bench.table import Table, figure, one
from engine.bench.timing import Spread, Tail, in_turn, spread, tail


@dataclass(frozen=True, slots=True)
class Sizes:
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prompt_tokens: int = 32
    output_tokens: int = 32


QUICK = Sizes(sequences=(1, 2, 4, 8), prompt_tokens=16, output_tokens=8)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    sequences: int
    output_tokens: int  # produced in all measured runs
    decode_tokens_per_s: Spread  # after the first token of each sequence
    sequence_tokens_per_s: Spread
    step_ms: Tail
    ratio: Spread  # of decode_tokens_per_s to the same round's run of the first row
    prefill_tokens_per_s: Spread
    total_tokens_per_s: Spread  # output tokens over the whole run


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    output_tokens: int
    rounds: int
    warmup_runs: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: int
    prefill_per_s: float
    decode_per_s: float
    total_per_s: float
    steps_ms: list[float]


def measure(subject: Subject, sizes: Sizes, rounds: int, seed: int, say: Callable[[str], object]) -> Throughput:
    _run(subject, sizes, max(sizes.sequences), seed, "warm-up")
    runs: dict[int, list[_Run]] = {count: [] for count in sizes.sequences}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for count in in_turn(sizes.sequences, number):
            runs[count].append(_run(subject, sizes, count, seed, number))
    base = [run.decode_per_s for run in runs[sizes.sequences[0]]]
    return Throughput(
        prompt_tokens=sizes.prompt_tokens,
        output_tokens=sizes.output_tokens,
        rounds=rounds,
        warmup_runs=1,
        rows=[_row(count, of_count, base) for count, of_count in runs.items()],
    )


def _run(subject: Subject, sizes: Sizes, count: int, seed: int, number: object) -> _Run:
    drive = subject.drive(max_step_tokens=WIDEST_STEP_TOKENS)
    prompts = [
        workloads.prompt(sizes.prompt_tokens, subject.vocab_size, seed, "throughput", number, count, i) for i in range(count)
    ]
    streams = [drive.add(prompt, sizes.output_tokens) for prompt in prompts]
    drive.finish()
    first, *decodes = drive.steps
    tokens = sum(len(stream.times) for stream in streams)
    assert all(step.decode_tokens == count for step in decodes), "a step did not decode all sequences"
    decode_s = decodes[-1].ended - first.ended
    whole_s = decodes[-1].ended - first.ended + first.ms / 1e3
    return _Run(
        tokens=tokens,
        prefill_per_s=first.prefill_tokens / first.ms * 1e3,
        decode_per_s=(tokens - count) / decode_s,
        total_per_s=tokens / whole_s,
        steps_ms=[step.ms for step in decodes],
    )


def _row(count: int, runs: list[_Run], base: list[float]) -> Row:
    return Row(
        sequences=count,
        output_tokens=sum(run.tokens for run in runs),
        decode_tokens_per_s=spread([run.decode_per_s for run in runs]),
        sequence_tokens_per_s=spread([run.decode_per_s / count for run in runs]),
        step_ms=tail([ms for run in runs for ms in run.steps_ms]),
        ratio=spread([run.decode_per_s / one for run, one in zip(runs, base, strict=True)]),
        prefill_tokens_per_s=spread([run.prefill_per_s for run in runs]),
        total_tokens_per_s=spread([run.total_per_s for run in runs]),
    )


def table(result: Throughput) -> Table:
    return Table(
        f"Throughput: prompts of {result.prompt_tokens} tokens, {result.output_tokens} out, {result.rounds} rounds, "
        "median (least..most)",
        ("sequences", "decode tok/s", "each tok/s", "ms/step p50", "p95", "ratio", "prefill tok/s", "whole run tok/s"),
        [
            (
                str(row.sequences),
                figure(row.decode_tokens_per_s),
                figure(row.sequence_tokens_per_s),
                one(row.step_ms.p50),
                one(row.step_ms.p95),
                figure(row.ratio, 2),
                figure(row.prefill_tokens_per_s),
                figure(row.total_tokens_per_s),
            )
            for row in result.rows
        ],
    )
