"""What a priority class is worth: requests that come one at a time to an engine that other requests keep full.

The background has more requests in work than the engine has places, so some always wait; one that ends is replaced at once. The
foreground's requests come at seeded moments. Variants: nothing in the background; foreground high or normal over low; and all
normal and of one client, as without classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.bench import workloads
from engine.bench.drive import Drive, Stream
from engine.bench.subject import Subject
from engine.bench.table import Table, figure, one
from engine.bench.timing import Spread, Tail, in_turn, spread, tail
from engine.types import Priority


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    foreground: Priority
    background: Priority | None
    background_client: str = "background"


VARIANTS = (
    Variant("alone", "normal", None),
    Variant("high over low", "high", "low"),
    Variant("normal over low", "normal", "low"),
    Variant("all normal, one client", "normal", "normal", "foreground"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    places: int = 8
    background: int = 12
    background_prompt_tokens: int = 64  # both are means, drawn like a mix
    background_output_tokens: int = 96  # long against the prompts: chunks of 16 tokens must be enough to keep all places taken
    requests: int = 12
    prompt_tokens: int = 64
    output_tokens: int = 16
    most_pause_steps: int = 8


QUICK = Sizes(background_prompt_tokens=16, background_output_tokens=24, requests=3, prompt_tokens=32, output_tokens=6)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    variant: str
    first_token_ms: Tail
    inter_token_ms: Tail
    queue_ms: Tail
    background_tokens_per_s: Spread  # drawn, while the foreground was measured
    running_at_arrival: Spread  # sequences in places when a request came
    preemptions: int
    output_tokens: int  # of the foreground, in all runs


class Priorities(msgspec.Struct, frozen=True, kw_only=True):
    places: int
    background: int
    background_prompt_tokens: int
    background_output_tokens: int
    lengths: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: int
    warmup_runs: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Run:
    streams: list[Stream]
    running: list[float]  # when each stream came
    background_per_s: float
    preemptions: int


class _Background:
    """Keeps so many requests in work."""

    def __init__(self, drive: Drive, variant: Variant, sizes: Sizes, vocab_size: int, names: tuple[object, ...]) -> None:
        self._drive, self._variant, self._sizes, self._vocab_size, self._names = drive, variant, sizes, vocab_size, names
        self._source = workloads.generator("background", *names)
        self._added = 0
        self._live: list[Stream] = []
        self._ended_tokens = 0
        self.ended = 0

    @property
    def tokens(self) -> int:
        return self._ended_tokens + sum(len(stream.times) for stream in self._live)

    @property
    def live(self) -> list[Stream]:
        return self._live

    def fill(self) -> None:
        if self._variant.background is None:
            return
        ended = [stream for stream in self._live if stream.finish]
        self.ended += len(ended)
        self._ended_tokens += sum(len(stream.times) for stream in ended)
        self._live = [stream for stream in self._live if not stream.finish]
        while len(self._live) < self._sizes.background:
            self._live.append(self._add(self._variant.background))

    def _add(self, priority: Priority) -> Stream:
        sizes = self._sizes
        mix = workloads.Mix("background", sizes.background_prompt_tokens, sizes.background_output_tokens)
        self._added += 1
        ((prompt_tokens, output_tokens),) = workloads.lengths(mix, 1, *self._names, self._added)
        prompt = workloads.prompt(prompt_tokens, self._vocab_size, "background", *self._names, self._added)
        return self._drive.add(prompt, output_tokens, priority=priority, client=self._variant.background_client)


def measure(subject: Subject, sizes: Sizes, rounds: int, seed: int, say: Callable[[str], object]) -> Priorities:
    _run(subject, sizes, VARIANTS[1], seed, "warm-up")
    runs: dict[Variant, list[_Run]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for variant in in_turn(VARIANTS, number):
            runs[variant].append(_run(subject, sizes, variant, seed, number))
    return Priorities(
        places=sizes.places,
        background=sizes.background,
        background_prompt_tokens=sizes.background_prompt_tokens,
        background_output_tokens=sizes.background_output_tokens,
        lengths=workloads.DISTRIBUTION,
        requests=sizes.requests,
        prompt_tokens=sizes.prompt_tokens,
        output_tokens=sizes.output_tokens,
        rounds=rounds,
        warmup_runs=1,
        rows=[_row(variant, of_variant) for variant, of_variant in runs.items()],
    )


def _run(subject: Subject, sizes: Sizes, variant: Variant, seed: int, number: object) -> _Run:
    drive = subject.drive(max_sequences=sizes.places)
    background = _Background(drive, variant, sizes, subject.vocab_size, (seed, number))
    while variant.background is not None and background.ended < sizes.places:  # until all places have changed hands
        background.fill()
        drive.step()
    pauses = workloads.generator("pauses", seed, number)
    started, tokens, preemptions = drive.now(), background.tokens, drive.engine.stats.preemptions
    streams, running = [], []
    for index in range(sizes.requests):
        for _ in range(pauses.randint(0, sizes.most_pause_steps)):
            background.fill()
            drive.step()
        prompt = workloads.prompt(sizes.prompt_tokens, subject.vocab_size, seed, "foreground", number, index)
        running.append(float(drive.engine.stats.running))
        stream = drive.add(prompt, sizes.output_tokens, priority=variant.foreground, client="foreground")
        streams.append(stream)
        while not stream.finish:
            background.fill()
            drive.step()
    run = _Run(
        streams,
        running,
        background_per_s=(background.tokens - tokens) / (drive.now() - started),
        preemptions=drive.engine.stats.preemptions - preemptions,
    )
    drive.stop(*background.live)
    return run


def _row(variant: Variant, runs: list[_Run]) -> Row:
    streams = [stream for run in runs for stream in run.streams]
    return Row(
        variant=variant.name,
        first_token_ms=tail([stream.first_token_ms for stream in streams]),
        inter_token_ms=tail([gap for stream in streams for gap in stream.gaps_ms]),
        queue_ms=tail([stream.usage.queue_ms for stream in streams if stream.usage]),
        background_tokens_per_s=spread([run.background_per_s for run in runs]),
        running_at_arrival=spread([running for run in runs for running in run.running]),
        preemptions=sum(run.preemptions for run in runs),
        output_tokens=sum(len(stream.times) for stream in streams),
    )


def table(result: Priorities) -> Table:
    return Table(
        f"Priorities: {result.requests} requests of {result.prompt_tokens} tokens, {result.output_tokens} out, one at a time, "
        f"beside {result.background} in {result.places} places; {result.rounds} rounds",
        (
            "foreground",
            "first token p50",
            "p95",
            "p99",
            "inter-token p50",
            "p95",
            "p99",
            "background tok/s",
            "running",
            "preemptions",
        ),
        [
            (
                row.variant,
                *map(one, (row.first_token_ms.p50, row.first_token_ms.p95, row.first_token_ms.p99)),
                *map(one, (row.inter_token_ms.p50, row.inter_token_ms.p95, row.inter_token_ms.p99)),
                figure(row.background_tokens_per_s),
                figure(row.running_at_arrival, 0),
                str(row.preemptions),
            )
            for row in result.rows
        ],
        ["times in ms"],
    )
