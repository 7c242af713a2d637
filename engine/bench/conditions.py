"""Under what conditions a figure was measured: machine, software, model, settings. Without them it cannot be compared.

Everything is asked when called. Of files only the name is told, no folder of the person's machine.
"""

from __future__ import annotations

import os
import platform as python_platform
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from engine import platform
from engine.bench.subject import Loaded


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    physical_cores: int  # that this process may use
    logical_cores: int
    isa_flags: list[str]  # of those that matter to kernels
    memory_bytes: int
    system: str


class Software(msgspec.Struct, frozen=True, kw_only=True):
    cavectl: str  # version, "not installed" when run from a source tree alone
    python: str
    torch: str | None  # None: no part that was run needs it
    torch_cpu_capability: str | None


class ModelUsed(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    file_bytes: int
    architecture: str
    quantization: str
    parameters: int
    weight_bytes: int  # in memory
    backend: str
    device: str
    dtype: str
    kv_dtype: str
    context_tokens: int
    pages: list[int]  # per cache group
    kv_bytes: int
    threads: int
    isa: str  # instruction set of the native backend's kernels; "" on others
    load_ms: float
    degraded: list[str]


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    started: str  # UTC, ISO 8601
    machine: Machine
    software: Software
    model: ModelUsed | None  # None: no part that was run needs it
    quick: bool
    repeats: int
    seed: int
    max_step_tokens: int
    load_average: list[float]  # 1, 5 and 15 minutes, before
    load_average_after: list[float]


def machine() -> Machine:
    cpu, flags = platform.cpu_model()
    return Machine(
        cpu=cpu,
        physical_cores=platform.physical_cores(),
        logical_cores=os.cpu_count() or 0,
        isa_flags=list(flags),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{python_platform.system()} {python_platform.release()} {python_platform.machine()}",
    )


def software(with_torch: bool) -> Software:
    try:
        version = metadata.version("cavectl")
    except metadata.PackageNotFoundError:
        version = "not installed"
    torch_version = capability = None
    if with_torch:
        import torch

        torch_version, capability = str(torch.__version__), torch.backends.cpu.get_cpu_capability()
    return Software(cavectl=version, python=python_platform.python_version(), torch=torch_version, torch_cpu_capability=capability)


def model_used(path: str, loaded: Loaded) -> ModelUsed:
    info = loaded.info
    return ModelUsed(
        file=Path(path).resolve().name,
        file_bytes=_bytes(Path(path)),
        architecture=info.architecture,
        quantization=loaded.model.quantization,
        parameters=info.parameters,
        weight_bytes=info.weight_bytes,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        context_tokens=info.context_tokens,
        pages=list(loaded.subject.pages),
        kv_bytes=info.kv_bytes,
        threads=info.threads,
        isa=info.isa,
        load_ms=info.load_ms,
        degraded=info.degraded,
    )


def load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix == ".safetensors"]
    return sum(file.stat().st_size for file in files)


def summary(under: Conditions) -> str:
    """The conditions in a few lines, to stand below the tables."""
    machine, software, model = under.machine, under.software, under.model
    lines = [
        f"machine: {machine.cpu}, {machine.physical_cores} cores ({machine.logical_cores} logical), "
        f"{machine.memory_bytes / 1e9:.0f} GB, {' '.join(machine.isa_flags)}; {machine.system}",
        f"software: cavectl {software.cavectl}, python {software.python}"
        + (f", torch {software.torch} ({software.torch_cpu_capability})" if software.torch else ""),
    ]
    if model:
        isa = f"{model.isa}, " if model.isa else ""
        lines.append(
            f"model: {model.file}, {model.file_bytes} bytes, {model.quantization}; {model.backend} backend, {model.dtype}, "
            f"{isa}cache {model.kv_dtype}, {sum(model.pages)} pages, context {model.context_tokens}, {model.threads} threads"
        )
    lines.append(
        f"run: {under.started}, rounds: {under.repeats}, seed {under.seed}, steps of up to {under.max_step_tokens} tokens, "
        f"load average {under.load_average[0]} before and {under.load_average_after[0]} after"
        + ("; QUICK: not to be compared" if under.quick else "")
    )
    return "\n".join(lines) + "\n"
