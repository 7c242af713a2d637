"""What a cached prefix saves: time to first token and tokens per second of a prompt whose beginning the cache holds, against none.

Variants: prefix cache off; on with nothing cached; on with half and nine tenths of the prompt cached. Each run has a fresh engine,
which first computes the prefix as a request of its own (not measured), and the variants take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.bench import workloads
from engine.bench.subject import Subject
from engine.bench.table import Table, figure
from engine.bench.timing import Spread, in_turn, spread
from engine.built import EngineOptions

SHARES = (None, 0.0, 0.5, 0.9)  # of the prompt that is cached; None: the prefix cache is off


@dataclass(frozen=True, slots=True)
class Sizes:
    prompt_tokens: int = 512
    output_tokens: int = 32

    def within(self, context_tokens: int) -> Sizes:
        """As much of the prompt as the context holds."""
        return Sizes(min(self.prompt_tokens, context_tokens - self.output_tokens), self.output_tokens)


QUICK = Sizes(prompt_tokens=256, output_tokens=8)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    cache: bool
    prefix_tokens: int  # computed before, by another request
    cached_tokens: list[int]  # as reported, of each run
    output_tokens: int  # produced in all measured runs
    first_token_ms: Spread
    output_tokens_per_s: Spread  # over the whole request
    decode_tokens_per_s: Spread  # after the first token
    first_token_ratio: Spread  # to the same round's run without the cache


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    output_tokens: int
    rounds: int
    warmup_runs: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Run:
    cached: int
    tokens: int
    first_token_ms: float
    whole_per_s: float
    decode_per_s: float


def measure(subject: Subject, sizes: Sizes, rounds: int, seed: int, say: Callable[[str], object]) -> Prefix:
    sizes = sizes.within(subject.context_tokens)
    _run(subject, sizes, None, seed, "warm-up")
    runs: dict[float | None, list[_Run]] = {share: [] for share in SHARES}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for share in in_turn(SHARES, number):
            runs[share].append(_run(subject, sizes, share, seed, number))
    return Prefix(
        prompt_tokens=sizes.prompt_tokens,
        output_tokens=sizes.output_tokens,
        rounds=rounds,
        warmup_runs=1,
        rows=[_row(share, _prefix_tokens(sizes, share), of_share, runs[None]) for share, of_share in runs.items()],
    )


def _prefix_tokens(sizes: Sizes, share: float | None) -> int:
    return round(sizes.prompt_tokens * (share or 0.0))


def _run(subject: Subject, sizes: Sizes, share: float | None, seed: int, number: object) -> _Run:
    drive = subject.drive(EngineOptions(prefix_cache=share is not None))
    prompt = workloads.prompt(sizes.prompt_tokens, subject.vocab_size, seed, "prefix", number)
    if prefix := _prefix_tokens(sizes, share):
        drive.add(prompt[:prefix], 1)
        drive.finish()
    stream = drive.add(prompt, sizes.output_tokens)
    drive.finish()
    assert stream.usage is not None
    first, last = stream.times[0], stream.times[-1]
    return _Run(
        cached=stream.usage.cached_tokens,
        tokens=len(stream.times),
        first_token_ms=stream.first_token_ms,
        whole_per_s=len(stream.times) / (last - stream.arrived),
        decode_per_s=(len(stream.times) - 1) / (last - first),
    )


def _row(share: float | None, prefix_tokens: int, runs: list[_Run], without: list[_Run]) -> Row:
    return Row(
        cache=share is not None,
        prefix_tokens=prefix_tokens,
        cached_tokens=[run.cached for run in runs],
        output_tokens=sum(run.tokens for run in runs),
        first_token_ms=spread([run.first_token_ms for run in runs]),
        output_tokens_per_s=spread([run.whole_per_s for run in runs]),
        decode_tokens_per_s=spread([run.decode_per_s for run in runs]),
        first_token_ratio=spread([run.first_token_ms / off.first_token_ms for run, off in zip(runs, without, strict=True)]),
    )


def table(result: Prefix) -> Table:
    return Table(
        f"Prefix hits: a prompt of {result.prompt_tokens} tokens, {result.output_tokens} out, {result.rounds} rounds, "
        "median (least..most)",
        ("prefix cache", "cached tokens", "first token ms", "of no cache", "tok/s", "decode tok/s"),
        [
            (
                f"on, {row.prefix_tokens} known" if row.cache else "off",
                "/".join(map(str, sorted(set(row.cached_tokens)))),
                figure(row.first_token_ms),
                figure(row.first_token_ratio, 2),
                figure(row.output_tokens_per_s),
                figure(row.decode_tokens_per_s),
            )
            for row in result.rows
        ],
    )
