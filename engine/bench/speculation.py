"""`python -m engine.bench.speculation MODEL`: what drafting gains, and costs where nothing is right; on and off take turns.

Sets: induction (a passage twice and begun a third time), edit (instructions to copy or change a text), chat, and random (random
ids, sampled at temperature 1, so that nothing repeats). A ratio is tokens per second after the first with drafts over those
without, of one prompt in one round; a set's figure is the geometric mean of its prompts' medians. Then pairs: the random set again,
short and often, for an interval. Prompts are ids of the SmolLM2 tokenizer (speculation_prompts.json); nothing else should run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from engine import platform
from engine.bench import conditions, timing, workloads
from engine.bench.drive import GREEDY
from engine.bench.subject import Loaded, Setup, Subject, load_subject
from engine.bench.table import Table
from engine.bench.timing import Spread, in_turn, spread
from engine.built import EngineOptions
from engine.errors import CavectlError, InvalidRequest
from engine.runtime.load import DRAFT_LIMITS
from engine.speculative.adaptive import Speculation, Wish
from engine.speculative.prompt_lookup import PromptLookup
from engine.speculative.tree import DraftTree
from engine.types import SamplingParams

PROMPTS = Path(__file__).with_name("speculation_prompts.json")
RANDOM_PROMPTS, RANDOM_TOKENS = 10, 64
ROUNDS, TOKENS = 5, 128
PAIRS, PAIR_TOKENS = 200, 48
LEAST = {"induction": 1.8, "edit": 1.0, "chat": 0.97, "random": 0.97}
NORMAL_95 = 1.96

Say = Callable[[str], object]


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    prompts: int
    ratio: float  # geometric mean over prompts of each one's median
    of_prompts: Spread
    off_tokens_per_s: float  # medians over prompts
    on_tokens_per_s: float
    drafted: int  # of one round
    accepted: int
    tokens: int
    least: float

    @property
    def verdict(self) -> str:
        return "met" if self.ratio >= self.least else "MISSED"


class Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """The random set, on and off one after the other: the mean of log ratios with its 95% interval, and what was spent."""

    pairs: int
    ratio: float
    low: float
    high: float
    tokens: int
    wrong_rows_per_1000_tokens: float
    plan_us_per_1000_tokens: float
    row_cost: float  # a row more, as a share of a step of one


class Document(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "speculation"
    schema: int = 1
    conditions: conditions.Conditions
    sets: list[SetResult]
    pairs: Pairs | None


class Timed(Speculation):
    """Notes how long planning took."""

    spent_s = 0.0

    def plan(self, wishes: Sequence[Wish], decodes: int, step_tokens: int, room: int) -> dict[int, DraftTree]:
        start = timing.seconds()
        trees = super().plan(wishes, decodes, step_tokens, room)
        self.spent_s += timing.seconds() - start
        return trees


def run(subject: Subject, speculation: Speculation | None, prompt: list[int], tokens: int, sampling: SamplingParams) -> float:
    """Tokens per second after the first, on an engine of its own; the speculation goes on from earlier runs, as in a worker."""
    drive = subject.drive(EngineOptions(speculation=speculation, prefix_cache=False))
    stream = drive.add(prompt, tokens, sampling=sampling)
    drive.until_tokens(stream, 1)
    start = drive.now()
    drive.finish()
    return (len(stream.times) - 1) / (drive.now() - start)


def measure_set(
    subject: Subject, speculation: Speculation, name: str, prompts: Sequence[list[int]], rounds: int, tokens: int, say: Say
) -> SetResult:
    ratios: list[list[float]] = [[] for _ in prompts]
    speeds: dict[bool, list[list[float]]] = {on: [[] for _ in prompts] for on in (True, False)}
    drafted = accepted = 0
    for number in range(rounds):
        before = (speculation.counts.drafted, speculation.counts.accepted)
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=1.0, seed=index) if name == "random" else GREEDY
            for on in in_turn((True, False), number + index):
                speeds[on][index].append(run(subject, speculation if on else None, prompt, tokens, sampling))
            ratios[index].append(speeds[True][index][-1] / speeds[False][index][-1])
        drafted, accepted = speculation.counts.drafted - before[0], speculation.counts.accepted - before[1]
        say(f"{name}: round {number + 1} of {rounds}: {statistics.geometric_mean(ratio[-1] for ratio in ratios):.2f}")
    medians = [statistics.median(ratio) for ratio in ratios]
    return SetResult(
        name=name,
        prompts=len(prompts),
        ratio=statistics.geometric_mean(medians),
        of_prompts=spread(medians),
        off_tokens_per_s=statistics.median(map(statistics.median, speeds[False])),
        on_tokens_per_s=statistics.median(map(statistics.median, speeds[True])),
        drafted=drafted,
        accepted=accepted,
        tokens=len(prompts) * (tokens - 1),
        least=LEAST[name],
    )


def measure_pairs(subject: Subject, pairs: int, say: Say) -> Pairs:
    """What it costs where nothing is right."""
    speculation = Timed(PromptLookup(), DRAFT_LIMITS)
    logs: list[float] = []
    for number in range(pairs):
        prompt = workloads.prompt(RANDOM_TOKENS, subject.vocab_size, "pairs", number)
        sampling = SamplingParams(temperature=1.0, seed=number)
        speed = {
            on: run(subject, speculation if on else None, prompt, PAIR_TOKENS, sampling) for on in in_turn((True, False), number)
        }
        logs.append(math.log(speed[True] / speed[False]))
        if number % 50 == 49:
            say(f"{number + 1} of {pairs} pairs")
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    tokens = pairs * (PAIR_TOKENS - 1)
    counts = speculation.counts
    return Pairs(
        pairs=pairs,
        ratio=math.exp(mean),
        low=math.exp(mean - NORMAL_95 * error),
        high=math.exp(mean + NORMAL_95 * error),
        tokens=tokens,
        wrong_rows_per_1000_tokens=(counts.drafted - counts.accepted) / tokens * 1000,
        plan_us_per_1000_tokens=speculation.spent_s / tokens * 1e9,
        row_cost=speculation.row_cost,
    )


def measure(options: argparse.Namespace, say: Say) -> Document:
    started, load = datetime.now(UTC), conditions.load_average()
    setup = Setup(context_tokens=2048, backend=options.backend, threads=options.threads)
    loaded = load_subject(options.model, lambda stage, fraction: None if fraction else say(stage), setup)
    sets = _prompts(loaded)
    speculation = Speculation(PromptLookup(), DRAFT_LIMITS)
    run(loaded.subject, speculation, sets["chat"][0], options.tokens, GREEDY)  # warm-up
    results = [
        measure_set(loaded.subject, speculation, name, prompts[: options.prompts], options.rounds, options.tokens, say)
        for name, prompts in sets.items()
    ]
    pairs = measure_pairs(loaded.subject, options.pairs, say) if options.pairs else None
    under = conditions.Conditions(
        started=started.isoformat(timespec="seconds"),
        machine=conditions.machine(),
        software=conditions.software(with_torch="torch" in sys.modules),
        model=conditions.model_used(options.model, loaded),
        quick=options.rounds < ROUNDS,
        repeats=options.rounds,
        seed=0,
        max_step_tokens=512,
        load_average=load,
        load_average_after=conditions.load_average(),
    )
    return Document(conditions=under, sets=results, pairs=pairs)


def _prompts(loaded: Loaded) -> dict[str, list[list[int]]]:
    """Raises InvalidRequest for a model with another vocabulary."""
    document: dict[str, Any] = msgspec.json.decode(PROMPTS.read_bytes())
    if loaded.info.vocab_size != document["vocab_size"]:
        raise InvalidRequest(
            f"the prompts are {document['tokenizer']}'s tokens, {document['vocab_size']} different ones; this model has "
            f"{loaded.info.vocab_size}"
        )
    sets = {name: [prompt["ids"] for prompt in prompts] for name, prompts in document["sets"].items()}
    sets["random"] = [workloads.prompt(RANDOM_TOKENS, loaded.info.vocab_size, "random", n) for n in range(RANDOM_PROMPTS)]
    return sets


def table(document: Document) -> Table:
    columns = ("set", "prompts", "off", "on", "unit", "ratio", "of prompts", "drafted", "right", "target", "verdict")
    rows = [
        (
            of.name,
            str(of.prompts),
            f"{of.off_tokens_per_s:.0f}",
            f"{of.on_tokens_per_s:.0f}",
            "tok/s",
            f"{of.ratio:.2f}",
            f"{of.of_prompts.least:.2f}..{of.of_prompts.most:.2f}",
            str(of.drafted),
            f"{of.accepted / of.drafted:.0%}" if of.drafted else "-",
            f">= {of.least:g}x",
            of.verdict,
        )
        for of in document.sets
    ]
    notes = [conditions.summary(document.conditions).rstrip()]
    if pairs := document.pairs:
        bound = pairs.wrong_rows_per_1000_tokens * pairs.row_cost / 10
        notes.insert(
            0,
            f"random, {pairs.pairs} pairs: {pairs.ratio:.4f} (95%: {pairs.low:.4f}..{pairs.high:.4f}); wrong rows per 1,000 tokens "
            f"{pairs.wrong_rows_per_1000_tokens:.1f}, each {pairs.row_cost:.0%} of a step: {bound:.2f}%; planning "
            f"{pairs.plan_us_per_1000_tokens / 1000:.1f} us a token",
        )
    return Table("Speculation by prompt lookup", columns, rows, notes)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    platform.limit_spinning()
    platform.expect_no_numpy()
    try:
        document = measure(options, lambda text: sys.stderr.write(f"{text}\n"))
    except CavectlError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    sys.stdout.write(table(document).text())
    if options.json:
        Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.speculation", description="Measure what drafting gains and costs."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a SmolLM2 model: a .gguf file, or a folder with config.json and safetensors"
    )
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument("--tokens", type=_positive, default=TOKENS, metavar="N", help=f"of each answer (default {TOKENS})")
    parser.add_argument("--prompts", type=_positive, metavar="N", help="of each set (default: all)")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"on and off over the random set (default {PAIRS})")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: one for each core")
    parser.add_argument("--backend", choices=("auto", "reference", "cpu"), default="auto")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
