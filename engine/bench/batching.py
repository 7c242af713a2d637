"""`python -m engine.bench.batching MODEL`: measures batching, prefix sharing, latency under load, priorities and page utilisation.

Loads the model once, in this process, without daemon or worker, runs each part and prints its table; `--json` keeps everything with
the conditions it was measured under. Nothing else should run meanwhile. The order of parts is fixed. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engine import platform
from engine.bench import conditions, latency, prefix, priorities, throughput, utilisation
from engine.bench.subject import MAX_STEP_TOKENS, Subject, load_subject
from engine.bench.table import Table
from engine.errors import CavectlError, InvalidRequest

SCHEMA_VERSION = 1
PARTS = ("throughput", "prefix", "latency", "priorities", "utilisation")
REPEATS = 3
QUICK_REPEATS = 1

Say = Callable[[str], object]


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """What `--json` writes. A part that was not asked for is null. Times in ms or as the names say, sizes in tokens or bytes."""

    benchmark: str = "batching"
    schema_version: int = SCHEMA_VERSION
    conditions: conditions.Conditions
    throughput: throughput.Throughput | None = None
    prefix: prefix.Prefix | None = None
    latency: latency.Latency | None = None
    priorities: priorities.Priorities | None = None
    utilisation: utilisation.Utilisation | None = None


Result = throughput.Throughput | prefix.Prefix | latency.Latency | priorities.Priorities | utilisation.Utilisation


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    platform.limit_spinning()
    platform.expect_no_numpy()
    try:
        _run(options)
    except CavectlError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"error: {error.message}{hint}\n")
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    target = Path(options.json) if options.json else None
    if target and not target.parent.is_dir():
        raise InvalidRequest(f"there is no folder {target.parent} to write to")
    started, load = datetime.now(UTC), conditions.load_average()
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    loaded = load_subject(options.model, _progress) if set(options.parts) != {"utilisation"} else None
    subject = loaded.subject if loaded else None
    results: dict[str, Result] = {}
    for part in PARTS:
        if part in options.parts:
            results[part], table = _measure(part, subject, quick=options.quick, repeats=repeats, seed=options.seed)
            sys.stdout.write(table.text() + "\n")
            sys.stdout.flush()
    under = conditions.Conditions(
        started=started.isoformat(timespec="seconds"),
        machine=conditions.machine(),
        software=conditions.software(with_torch=loaded is not None),
        model=conditions.model_used(options.model, loaded) if loaded else None,
        quick=options.quick,
        repeats=repeats,
        seed=options.seed,
        max_step_tokens=MAX_STEP_TOKENS,
        load_average=load,
        load_average_after=conditions.load_average(),
    )
    sys.stdout.write(conditions.summary(under))
    if target:
        document = Document(conditions=under, **results)  # pyright: ignore[reportArgumentType]
        target.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _measure(part: str, subject: Subject | None, *, quick: bool, repeats: int, seed: int) -> tuple[Result, Table]:
    def say(text: str) -> None:
        sys.stderr.write(f"{part}: {text}\n")

    if part == "utilisation":
        filled = utilisation.measure(utilisation.QUICK if quick else utilisation.Sizes(), repeats, seed, say)
        return filled, utilisation.table(filled)
    assert subject is not None, "this part runs on a model"
    if part == "throughput":
        speed = throughput.measure(subject, throughput.QUICK if quick else throughput.Sizes(), repeats, seed, say)
        return speed, throughput.table(speed)
    if part == "prefix":
        hits = prefix.measure(subject, prefix.QUICK if quick else prefix.Sizes(), repeats, seed, say)
        return hits, prefix.table(hits)
    if part == "latency":
        gaps = latency.measure(subject, latency.QUICK if quick else latency.Sizes(), repeats, seed, say)
        return gaps, latency.table(gaps)
    assert part == "priorities"
    classes = priorities.measure(subject, priorities.QUICK if quick else priorities.Sizes(), repeats, seed, say)
    return classes, priorities.table(classes)


def _progress(stage: str, fraction: float) -> None:
    if not fraction:
        sys.stderr.write(f"{stage}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.batching", description="Measure the engine on a model.")
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a folder with config.json and safetensors")
    parser.add_argument("--json", metavar="FILE", help="write figures and conditions there")
    parser.add_argument("--quick", action="store_true", help="small sizes and one repeat: to try it out, not to compare")
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="A,B", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--repeats", type=_positive, metavar="N", help=f"rounds of each part (default {REPEATS})")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and pauses (default 0)")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
