"""`python -m engine.bench.speed MODEL`: tokens per second of prefill and decode, engine only. What `cavectl bench` runs.

Loads the model in this process and drives the engine as its worker does, with the prefix cache off: no daemon, no socket, no text.
Tokens are ids drawn from a seed, every decoded one is the likeliest (argmax included), and decoding counts no prefill. Tests take
turns round by round. Progress goes to stderr; the last line of stdout is one JSON document: the figures, or {"error": ...}.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import psutil

from engine import platform
from engine.bench import conditions, floor, workloads
from engine.bench.drive import Drive
from engine.bench.notation import DEFAULT_TESTS, SpeedTest, parse_tests
from engine.bench.subject import MAX_SEQUENCES, MAX_STEP_TOKENS, WIDEST_STEP_TOKENS, Loaded, Setup, Subject, load_subject
from engine.bench.timing import in_turn, spread
from engine.built import EngineOptions
from engine.cache.blocks import pages_for
from engine.errors import CavectlError, ErrorInfo, InvalidRequest

SCHEMA = 1
REPEATS = 5
UNIT = "tokens/s"
WARMUP_TOKENS = 16
GROWING_STEPS, LEAST_CHUNK_PAGES = 16, 16  # until chunks beside decodes are large; how large they are then at least
# Nothing is shared between prompts, and no chunk is cut for the sake of those that decode already.
OPTIONS = EngineOptions(prefix_cache=False, target_step_ms=1e9)

Say = Callable[[str], object]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    median: float
    min: float
    max: float
    n: int
    unit: str = UNIT


class Document(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "speed"
    schema: int = SCHEMA
    conditions: conditions.Conditions
    resident_bytes: int  # of the whole process, after the tests
    tests: dict[str, Result]
    floor: floor.Floor


@dataclass(frozen=True, slots=True)
class Asked:
    model: str
    tests: list[SpeedTest]
    repeats: int = REPEATS
    seed: int = 0
    backend: str = "auto"
    kv_dtype: str = ""  # "": the backend's own
    threads: int | None = None
    isa: str = ""  # "": the best
    packed_path: str = ""
    weights_digest: str = ""


def measure(asked: Asked, say: Say) -> Document:
    """Raises InvalidRequest for tests that the model's context does not hold, and what loading raises."""
    started, load = datetime.now(UTC), conditions.load_average()
    loaded = load_subject(asked.model, lambda stage, fraction: None if fraction else say(stage), _setup(asked))
    _check(asked.tests, loaded.subject.context_tokens)
    figures = run_tests(loaded.subject, asked.tests, asked.repeats, asked.seed, say)
    tests = {name: _result(values) for name, values in figures.items()}
    resident = psutil.Process().memory_info().rss
    say("measuring read bandwidth")
    medians = [(test, tests[test.name].median) for test in asked.tests]
    under = conditions.Conditions(
        started=started.isoformat(timespec="seconds"),
        machine=conditions.machine(),
        software=conditions.software(with_torch="torch" in sys.modules),
        model=conditions.model_used(asked.model, loaded),
        quick=False,
        repeats=asked.repeats,
        seed=asked.seed,
        max_step_tokens=MAX_STEP_TOKENS,
        load_average=load,
        load_average_after=conditions.load_average(),
    )
    return Document(conditions=under, resident_bytes=resident, tests=tests, floor=_floor(loaded, medians))


def run_tests(subject: Subject, tests: Sequence[SpeedTest], repeats: int, seed: int, say: Say) -> dict[str, list[float]]:
    """Tokens per second of each repeat, by the test's name."""
    figures: dict[str, list[float]] = {test.name: [] for test in tests}
    for number in range(repeats):
        for test in in_turn(tests, number):
            value = run_test(subject, test, (seed, number))
            figures[test.name].append(value)
            say(f"{test.name}: round {number + 1} of {repeats}: {value:.1f} {UNIT}")
    return figures


def run_test(subject: Subject, test: SpeedTest, seed: tuple[int, int]) -> float:
    """Tokens per second of one run, on an engine of its own."""
    drive = subject.drive(OPTIONS, max_step_tokens=MAX_STEP_TOKENS if test.sequences == 1 else WIDEST_STEP_TOKENS)

    def prompt(tokens: int, name: object) -> list[int]:
        return workloads.prompt(tokens, subject.vocab_size, *seed, test.name, name)

    if test.is_decode:
        _prefill(drive, prompt(WARMUP_TOKENS, "warm-up"))
        prompts = [prompt(test.depth, sequence) for sequence in range(test.sequences)]
        return _decode(drive, prompts, test.tokens, subject.context_tokens)
    _prefill(drive, prompt(test.tokens, "warm-up"))
    return test.tokens / _prefill(drive, prompt(test.tokens, "measured"))


def _prefill(drive: Drive, prompt: list[int]) -> float:
    """Seconds from the arrival of a request to its only token."""
    stream = drive.add(prompt, 1)
    drive.until_tokens(stream, 1)
    return stream.first_token_ms / 1e3


def _decode(drive: Drive, prompts: list[list[int]], tokens: int, context_tokens: int) -> float:
    """Tokens per second of all sequences together, from the step after the first in which all of them decoded."""
    streams = [drive.add(prompt, context_tokens - len(prompt)) for prompt in prompts]
    for stream in streams:
        drive.until_tokens(stream, 2)
    before, start = sum(len(stream.times) for stream in streams), drive.now()
    drive.until_tokens(streams[0], len(streams[0].times) + tokens)
    end = drive.now()
    decoded = sum(len(stream.times) for stream in streams) - before
    if decoded != tokens * len(streams):
        raise RuntimeError(f"{decoded} tokens came where {tokens * len(streams)} were to be measured")
    drive.stop(*streams)
    return decoded / (end - start)


def room_tokens(test: SpeedTest) -> int:
    """The context that a test needs. Sequences whose prompts are computed first decode on until the last prompt is done."""
    if not test.is_decode:
        return test.tokens + 1
    later_steps = pages_for(max(0, test.depth * test.sequences - WIDEST_STEP_TOKENS)) // LEAST_CHUNK_PAGES
    longest = test.depth + test.tokens + 4 + (GROWING_STEPS + later_steps if test.sequences > 1 else 0)
    return max(longest, WARMUP_TOKENS + 1)


def _setup(asked: Asked) -> Setup:
    wanted = max(room_tokens(test) for test in asked.tests)
    return Setup(
        context_tokens=wanted,
        max_step_tokens=WIDEST_STEP_TOKENS if any(test.sequences > 1 for test in asked.tests) else MAX_STEP_TOKENS,
        max_sequences=max(MAX_SEQUENCES, *(test.sequences for test in asked.tests)),
        least_pages=max(test.sequences * (pages_for(room_tokens(test)) + 1) for test in asked.tests),
        backend=asked.backend,
        kv_dtype=asked.kv_dtype,
        threads=asked.threads,
        isa=asked.isa,
        packed_path=asked.packed_path,
        weights_digest=asked.weights_digest,
    )


def _check(tests: Sequence[SpeedTest], context_tokens: int) -> None:
    for test in tests:
        if room_tokens(test) > context_tokens:
            raise InvalidRequest(
                f"the test {test.name} needs a context of {room_tokens(test)} tokens, the model holds {context_tokens}",
                hint="take fewer tokens, or a smaller depth (@)",
            )


def _result(values: Sequence[float]) -> Result:
    of = spread(values)
    return Result(median=round(of.median, 2), min=round(of.least, 2), max=round(of.most, 2), n=of.count)


def _floor(loaded: Loaded, medians: Sequence[tuple[SpeedTest, float]]) -> floor.Floor:
    return floor.measure(loaded.info.threads, loaded.read_weight_bytes, loaded.subject.layout, medians)


def main(arguments: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _parser().parse_args(arguments)
    platform.limit_spinning()
    platform.expect_no_numpy()
    try:
        answer: Document | dict[str, ErrorInfo] = measure(_asked(options), lambda text: sys.stderr.write(f"{text}\n"))
    except CavectlError as error:
        answer = {"error": error.info}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return int(isinstance(answer, dict))


def _asked(options: argparse.Namespace) -> Asked:
    return Asked(
        model=options.model,
        tests=parse_tests(options.tests),
        repeats=options.reps,
        seed=options.seed,
        backend=options.backend,
        kv_dtype=options.kv_dtype,
        threads=options.threads,
        isa=options.isa,
        packed_path=options.packed,
        weights_digest=options.weights_digest,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.speed", description="Measure prefill and decode of a model.")
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a folder with config.json and safetensors")
    parser.add_argument("--tests", default=DEFAULT_TESTS, help=f"default {DEFAULT_TESTS}")
    parser.add_argument("--reps", type=_positive, default=REPEATS, metavar="N", help=f"rounds (default {REPEATS})")
    parser.add_argument("--seed", type=int, default=0, help="of the token ids (default 0)")
    parser.add_argument("--backend", choices=("auto", "reference", "cpu", "cuda"), default="auto")
    parser.add_argument("--kv-dtype", default="", choices=("", "float32", "float16", "bfloat16", "int8"))
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: one for each core")
    parser.add_argument("--isa", default="", metavar="NAME", help="avx2, avx512, neon or scalar (default: the best)")
    parser.add_argument("--packed", default="", metavar="FILE", help="the model's packed weights, made if they are not there")
    parser.add_argument("--weights-digest", default="", metavar="DIGEST", help="of the weights that they must come from")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
