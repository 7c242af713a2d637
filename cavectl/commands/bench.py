"""bench: how fast a model is here, engine only. A child process measures (engine/bench/speed.py); here it is laid out.

No daemon is needed, started or asked: the model is found in the store's files, or is a path. Invariant: stdout holds the figures
alone, as a table or as one JSON document in its last line; how far it is goes to stderr.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cavectl.arguments import Json, ModelName
from cavectl.environment import Environment
from cavectl.target import is_path, model_name
from engine.errors import CavectlError, InvalidRequest

Backend = Literal["auto", "reference", "cpu", "cuda"]
KvDtype = Literal["auto", "float16", "float32", "int8"]
_TESTS = "pp128,pp512,tg128,tg64@4096,tg64x8"
_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the packages


def bench(
    context: typer.Context,
    *,
    model: ModelName,
    tests: Annotated[
        str, typer.Option(metavar="A,B", help="ppN: prefill of N tokens; tgN: decode; @D: at depth D; xS: S sequences together.")
    ] = _TESTS,
    reps: Annotated[int, typer.Option(min=1, metavar="N", help="How often each test runs; they take turns.")] = 5,
    threads: Annotated[int, typer.Option(min=0, metavar="COUNT", help="0: one for each core.")] = 0,
    kv_dtype: Annotated[KvDtype, typer.Option(help="What keys and values are kept in; auto: the backend's own.")] = "auto",
    isa: Annotated[str, typer.Option(metavar="NAME", help="Instruction set: avx2, avx512, neon or scalar; else the best.")] = "",
    backend: Annotated[Backend, typer.Option(help="What computes; auto: the fastest one that can.")] = "auto",
    json: Json = False,
) -> None:
    """Measure how fast a model is here: tokens per second, engine only.

    Nothing else should run meanwhile.
    """
    environment: Environment = context.obj
    if environment.url:
        raise InvalidRequest("a model is measured on this machine only", hint="leave --url out")
    command = ["--tests", tests, "--reps", str(reps), "--backend", backend]
    command += ["--kv-dtype", kv_dtype] if kv_dtype != "auto" else []
    command += ["--threads", str(threads)] if threads else []
    command += ["--isa", isa] if isa else []
    document, line = _measure([*_weights(environment, model), *command])
    if json:
        for row in _lines(document):
            environment.console.note(row)
        environment.console.line(line)
        return
    for row in _lines(document):
        environment.console.line(row)


def _weights(environment: Environment, model: str) -> list[str]:
    """A model as the child is told of it: the path that was given, or what the store has."""
    name = model_name(model)
    if is_path(model) and (path := Path(model).expanduser().absolute()).exists():
        return [str(path)]
    from daemon.store import Store

    record = Store(environment.settings.data_dir).get(name)
    return [str(record.weights), "--packed", str(record.packed), "--weights-digest", record.weights_digest]


def _measure(arguments: list[str]) -> tuple[dict[str, Any], str]:
    """What the child says in its last line, read and as it stands. Raises the error that it names."""
    import msgspec

    from daemon.interpreter import python_module

    command = python_module("engine.bench.speed", *arguments)
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        try:
            output, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    try:
        line = output.decode().splitlines()[-1]
        document = msgspec.json.decode(line, type=dict[str, Any])
    except (IndexError, UnicodeDecodeError, msgspec.DecodeError):
        raise CavectlError(f"the measurement ended with code {child.returncode}", hint="see what it wrote above") from None
    if failure := document.get("error"):
        raise CavectlError(failure["message"], hint=failure.get("hint", ""), code=failure["code"])
    return document, line


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The figures of a document as a table, with what they were measured on."""
    tests, floors = document["tests"], document["floor"]["tests"]
    rows: list[tuple[str, ...]] = [("TEST", "TOKENS/S", "LEAST", "MOST", "OF THE FLOOR")]
    for name, result in tests.items():
        share = f"{floors[name]['percent']:.0f}%" if name in floors else ""
        rows.append((name, *(f"{result[key]:.1f}" for key in ("median", "min", "max")), share))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        figures = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *figures]).rstrip()
    yield from _remarks(document)


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    model, bandwidth = document["conditions"]["model"], document["floor"]["bandwidth"]
    isa = f" ({model['isa']})" if model["isa"] else ""
    yield ""
    yield (
        f"{model['file']}: {model['quantization']}, {model['backend']} backend{isa}, cache {model['kv_dtype']}, "
        f"{model['threads']} threads, {document['resident_bytes'] / 1e6:.0f} MB resident"
    )
    if bandwidth is None:
        yield f"memory's speed was not measured: {document['floor']['why']}"
        return
    one, all_ = bandwidth["one_thread"]["most"], bandwidth["all_threads"]["most"]
    yield f"memory is read at {one:.1f} GB/s with one thread, {all_:.1f} GB/s with {bandwidth['threads']}"
