"""How full the cache's pages are: filled slots over slots of all pages owned or cached, after every step, averaged over steps.

Pages depend on lengths and on scheduling, not on the model, so none runs: tokens are hashes, and a step takes a given time on a
clock of its own. The same seed gives the same figures on every machine. So many requests are in work at once, in a pool that holds
less than they need together at their longest: sequences are preempted and cached prefixes evicted. No two prompts share a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import msgspec

from engine.bench import workloads
from engine.bench.hash_executor import HashExecutor, VirtualClock
from engine.bench.subject import Subject
from engine.bench.table import Table
from engine.bench.timing import Spread, spread
from engine.bench.workloads import MIXES, Mix
from engine.cache.layout import CacheGroup, CacheLayout, Plane
from engine.runtime.batch import PAGE_TOKENS

STEP_MS, TOKEN_MS = 10.0, 0.25
VOCAB_SIZE = 32000
GOAL = 0.9


@dataclass(frozen=True, slots=True)
class Sizes:
    requests: int = 100
    at_once: int = 8
    pool_share: float = 0.8  # of what `at_once` requests of mean length need at their end


QUICK = Sizes(requests=24)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    mix: str
    prompt_tokens: int  # means
    output_tokens: int
    pages: int
    utilisation: Spread  # of each round: mean over its steps
    worst_step: float
    pool_in_use: Spread  # pages owned or cached over all pages: mean over steps
    pool_owned: Spread  # pages that running sequences hold over all pages: mean over steps
    steps: int  # these in all rounds
    requests: int
    tokens_out: int
    preemptions: int
    evicted_pages: int
    recomputed_tokens: int  # computed again after a preemption
    reaches_goal: bool


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    executor: str
    lengths: str
    at_once: int
    pool_share: float
    goal: float
    rounds: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Run:
    filled: list[float]  # share of slots, by step
    in_use: list[float]  # share of pages owned or cached, by step
    owned: list[float]  # share of pages that running sequences hold, by step
    requests: int
    tokens_out: int
    preemptions: int
    evicted_pages: int
    recomputed_tokens: int


def measure(sizes: Sizes, rounds: int, seed: int, say: Callable[[str], object]) -> Utilisation:
    rows = []
    for mix in MIXES:
        say(mix.name)
        rows.append(_row(mix, sizes, [_run(mix, sizes, seed, number) for number in range(rounds)]))
    return Utilisation(
        executor=f"no model: tokens by hash, a step takes {STEP_MS:g} ms and {TOKEN_MS:g} ms for each token of a clock of its own",
        lengths=workloads.DISTRIBUTION,
        at_once=sizes.at_once,
        pool_share=sizes.pool_share,
        goal=GOAL,
        rounds=rounds,
        rows=rows,
    )


def _pool_pages(mix: Mix, sizes: Sizes) -> int:
    return int(sizes.pool_share * sizes.at_once * (mix.prompt_tokens + mix.output_tokens) / PAGE_TOKENS)


def _run(mix: Mix, sizes: Sizes, seed: int, number: int) -> _Run:
    lengths = workloads.lengths(mix, sizes.requests, seed, number)
    pages, clock = _pool_pages(mix, sizes), VirtualClock()
    drive = Subject(
        HashExecutor(clock, step_ms=STEP_MS, token_ms=TOKEN_MS, vocab_size=VOCAB_SIZE),
        CacheLayout((CacheGroup("full", None, (0,), (Plane("k", 0, "float16", (1, 64)),)),)),
        (pages,),
        context_tokens=max(prompt + output for prompt, output in lengths),
        vocab_size=VOCAB_SIZE,
        clock=clock,
    ).drive(max_sequences=sizes.at_once)
    filled, in_use, owned = [], [], []
    waiting = list(enumerate(lengths))[::-1]
    while True:
        while waiting and drive.live < sizes.at_once:
            index, (prompt_tokens, output_tokens) = waiting.pop()
            drive.add(workloads.prompt(prompt_tokens, VOCAB_SIZE, seed, mix.name, number, index), output_tokens)
        if not drive.step():
            break
        (full, slots), stats = drive.engine.cache_filled(), drive.engine.stats
        held = stats.pages_used + stats.pages_cached + stats.pages_pinned
        assert slots == held * PAGE_TOKENS, "pages owned or cached are counted otherwise than their slots"
        filled.append(full / slots)
        in_use.append(held / pages)
        owned.append(stats.pages_used / pages)
    return _Run(
        filled=filled,
        in_use=in_use,
        owned=owned,
        requests=len(drive.streams),
        tokens_out=sum(len(stream.times) for stream in drive.streams.values()),
        preemptions=drive.engine.stats.preemptions,
        evicted_pages=drive.engine.stats.evicted_pages,
        recomputed_tokens=sum(step.prefill_tokens for step in drive.steps) - sum(prompt for prompt, _ in lengths),
    )


def _row(mix: Mix, sizes: Sizes, runs: list[_Run]) -> Row:
    utilisation = spread([fmean(run.filled) for run in runs])
    return Row(
        mix=mix.name,
        prompt_tokens=mix.prompt_tokens,
        output_tokens=mix.output_tokens,
        pages=_pool_pages(mix, sizes),
        utilisation=utilisation,
        worst_step=min(min(run.filled) for run in runs),
        pool_in_use=spread([fmean(run.in_use) for run in runs]),
        pool_owned=spread([fmean(run.owned) for run in runs]),
        steps=sum(len(run.filled) for run in runs),
        requests=sum(run.requests for run in runs),
        tokens_out=sum(run.tokens_out for run in runs),
        preemptions=sum(run.preemptions for run in runs),
        evicted_pages=sum(run.evicted_pages for run in runs),
        recomputed_tokens=sum(run.recomputed_tokens for run in runs),
        reaches_goal=utilisation.median >= GOAL,
    )


def table(result: Utilisation) -> Table:
    return Table(
        f"Page utilisation: {result.at_once} requests at once, pool {result.pool_share:.0%} of their demand, "
        f"{result.rounds} rounds, mean over steps, median (least..most)",
        (
            "mix",
            "mean in/out",
            "pages",
            "filled slots",
            "worst step",
            "pool in use",
            "owned",
            "steps",
            "preemptions",
            "recomputed",
            "evicted",
        ),
        [_cells(row) for row in result.rows],
        [result.executor, f"lengths: {result.lengths}"],
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.mix,
        f"{row.prompt_tokens}/{row.output_tokens}",
        str(row.pages),
        _percent(row.utilisation),
        f"{row.worst_step:.1%}",
        _percent(row.pool_in_use),
        _percent(row.pool_owned),
        *map(str, (row.steps, row.preemptions, row.recomputed_tokens, row.evicted_pages)),
    )


def _percent(values: Spread) -> str:
    return f"{values.median:.1%} ({values.least:.1%}..{values.most:.1%})"
