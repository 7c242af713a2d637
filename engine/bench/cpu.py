"""`python -m engine.bench.cpu --against-llamacpp PYTHON MODEL.gguf`: the CPU backend beside llama.cpp, same file, same run.

Both sides run in turn, each run in a process of its own with the same number of threads, and a ratio is taken within its round. The
parts: speed (engine only), busy (beside a pinned spinner), http and cold (with --llama-server), memory, perplexity (with --text).
Nothing else should run meanwhile. llama.cpp is no dependency: PYTHON is an interpreter that has llama-cpp-python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from engine import platform
from engine.bench import comparison, conditions
from engine.bench.comparison import Row
from engine.bench.comparison_parts import PARTS, Plan
from engine.bench.sides import THEIR_SCRIPT, Ours, Theirs
from engine.errors import CavectlError, InvalidRequest

SCHEMA = 1
ROUNDS = 5


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    benchmark: str = "cpu"
    schema: int = SCHEMA
    started: str
    machine: conditions.Machine
    load_average: list[float]
    load_average_after: list[float]
    model: str
    threads: int
    rounds: int
    rows: list[Row]
    details: dict[str, Any]  # of each part: what else it saw


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
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
    if not Path(options.model).exists():
        raise InvalidRequest(f"there is no file {options.model}")
    started, load = datetime.now(UTC), conditions.load_average()
    plan = _plan(options)
    rows, details = list[Row](), dict[str, Any]()
    for name, part in PARTS.items():
        if name in options.parts:
            plan.say(f"--- {name}")
            found, details[name] = part(plan)
            rows += found
    document = Document(
        started=started.isoformat(timespec="seconds"),
        machine=conditions.machine(),
        load_average=load,
        load_average_after=conditions.load_average(),
        model=Path(options.model).name,
        threads=plan.threads,
        rounds=options.rounds,
        rows=rows,
        details=details,
    )
    sys.stdout.write(comparison.table(rows, _notes(document)).text())
    if target:
        target.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _plan(options: argparse.Namespace) -> Plan:
    threads = options.threads or platform.physical_cores()

    def theirs(model: str) -> Theirs:
        script = Path(options.llamacpp_script) if options.llamacpp_script else THEIR_SCRIPT
        return Theirs(options.against_llamacpp, model, threads, script, not options.no_extra_buffers)

    return Plan(
        ours=Ours(options.model, threads, options.backend, options.kv_dtype, options.isa),
        theirs=theirs(options.model),
        theirs_q4_0=theirs(options.q4_0) if options.q4_0 else None,
        llama_server=options.llama_server,
        text=Path(options.text) if options.text else None,
        rounds=options.rounds,
        say=lambda text: sys.stderr.write(f"{text}\n"),
    )


def _notes(document: Document) -> list[str]:
    machine = document.machine
    lines = [
        f"machine: {machine.cpu}, {machine.physical_cores} cores, {' '.join(machine.isa_flags)}; {machine.system}",
        f"run: {document.started}, {document.model}, {document.threads} threads, {document.rounds} rounds, load average "
        f"{document.load_average[0]} before and {document.load_average_after[0]} after",
    ]
    if seen := document.details.get("speed", {}).get("bandwidth"):
        lines.append(f"memory: {seen['one_thread']:.1f} GB/s with one thread, {seen['all_threads']:.1f} GB/s with all")
    if document.rounds < ROUNDS:
        lines.append(f"fewer than {ROUNDS} rounds: not to be published")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.cpu", description="Measure the CPU backend beside llama.cpp.")
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--against-llamacpp", required=True, metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--llamacpp-script", metavar="PATH", help="another script with the interface of llamacpp_side.py")
    parser.add_argument("--no-extra-buffers", action="store_true", help="for a llama.cpp whose AMX kernels cannot run here")
    parser.add_argument("--llama-server", metavar="PATH", help="the program, for the parts http and cold")
    parser.add_argument("--q4-0", metavar="FILE", help="the same model as Q4_0, for llama.cpp's side only")
    parser.add_argument("--text", metavar="FILE", help="for the part perplexity")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: one for each core")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument("--backend", choices=("auto", "reference", "cpu"), default="auto", help="of our side")
    parser.add_argument("--kv-dtype", default="", choices=("", "float32", "float16", "int8"), help="of our side")
    parser.add_argument("--isa", default="", help="of our side in the parts speed, busy and memory (default: the best)")
    parser.add_argument("--parts", type=_parts, default=tuple(PARTS), metavar="A,B", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
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
