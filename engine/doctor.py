"""`python -m engine.doctor`: what this machine and installation have for the engine, and which models the native backend runs.

Reads one JSON list of AskedModel on stdin, prints one JSON EngineReport on stdout, exits 0. A task of its own because the command
line does not import the engine. Invariant: nothing is changed or compiled, no torch, no numpy, no weight read.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import msgspec

from engine import platform
from engine.errors import CavectlError
from engine.kernels.cpu import build
from engine.kernels.cpu.lib import NativeUnavailable, cache_folder, load
from engine.models.families import family_for
from engine.runtime.native_plan import unsupported


class AskedModel(msgspec.Struct, frozen=True):
    model: str
    architecture: str
    config: dict[str, Any]


class ModelReasons(msgspec.Struct, frozen=True):
    """A model and why it is on a list: a phrase each."""

    model: str
    why: list[str]


class Cpu(msgspec.Struct, frozen=True):
    model: str
    flags: list[str]
    physical_cores: int


class Native(msgspec.Struct, frozen=True, kw_only=True):
    """The native library. `isas`: built and run here, best first, so the first is used. `why`: one line when it is not there."""

    state: str  # "ready", "not built" (a source tree before the first load) or "unavailable"
    path: str = ""
    isas: list[str] = []
    used: str = ""
    why: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    cpu: Cpu
    native: Native
    compiler: str | None
    torch: str | None  # versions, None where it is not installed
    triton: str | None
    falls_back_to_reference: list[ModelReasons]
    cannot_run: list[ModelReasons]  # on no backend


def report(models: list[AskedModel]) -> EngineReport:
    native = _native()
    compiler = build.compiler()
    slow, never = _sorted_out(models, native)
    name, flags = platform.cpu_model()
    return EngineReport(
        cpu=Cpu(name, list(flags), platform.physical_cores()),
        native=native,
        compiler=compiler[0] if compiler else None,
        torch=_version("torch"),
        triton=_version("triton"),
        falls_back_to_reference=slow,
        cannot_run=never,
    )


def _native() -> Native:
    try:
        if not (build.SOURCES / build.NAME).exists() and not build.cached_path(cache_folder()).exists():
            return Native(state="not built", why="it is built when the first model is loaded")
        library = load()
    except (build.BuildError, OSError) as error:
        return Native(state="unavailable", why=f"the native backend is not built: {error}")
    except NativeUnavailable as error:
        return Native(state="unavailable", why=error.message)
    return Native(state="ready", path=str(library.path), isas=list(library.isas), used=library.isas[0])


def _sorted_out(models: list[AskedModel], native: Native) -> tuple[list[ModelReasons], list[ModelReasons]]:
    """Those that the reference backend runs in the native one's place, and those that none runs."""
    slow: list[ModelReasons] = []
    never: list[ModelReasons] = []
    for asked in models:
        try:
            reasons = unsupported(family_for(asked.architecture).spec(asked.config, None), "float16")
        except CavectlError as error:
            never.append(ModelReasons(asked.model, [error.message]))
            continue
        why = [f"the cpu backend does not have {reason}" for reason in reasons]
        if native.state == "unavailable":
            why.append(native.why)
        if why:
            slow.append(ModelReasons(asked.model, why))
    return slow, never


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    models = msgspec.json.decode(sys.stdin.buffer.read(), type=list[AskedModel])
    sys.stdout.buffer.write(msgspec.json.encode(report(models)))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
