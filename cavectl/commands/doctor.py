"""doctor: what this installation has, and what is missing for it to be fast or to work at all.

The engine's part comes from a child (engine/doctor.py), GPUs from nvidia-smi, models from the store's files. No daemon is needed or
started, nothing is changed. Invariant: it takes a few hundred milliseconds and imports no torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from cavectl import __version__, launch
from cavectl.arguments import Json
from cavectl.environment import Environment
from cavectl.exit_codes import ExitCode
from engine.errors import CavectlError, InvalidRequest

_BRINGS_TORCH = "./install.sh --with-torch"
_LIMIT_S = 60.0
_GPU_LIMIT_S = 10.0


def doctor(context: typer.Context, *, json: Json = False) -> ExitCode:
    """Say what this installation has, and what is missing.

    Processor, native backend, torch, GPUs, daemon, folders; nothing is changed. The exit code is 0 when models can run, 8 when no
    backend is there, 1 for anything else under PROBLEMS.
    """
    environment: Environment = context.obj
    if environment.url:
        raise InvalidRequest("this command is about this machine, and --url names another", hint="leave --url out")
    facts = _facts(environment)
    if json:
        environment.console.document(facts)
    else:
        for line in _lines(facts):
            environment.console.line(line)
    if not facts["problems"]:
        return ExitCode.OK
    return ExitCode.ERROR if _has_backend(facts) else ExitCode.DEVICE


def _facts(environment: Environment) -> dict[str, Any]:
    settings = environment.settings
    engine = _engine(_models(environment))
    torch, triton = ({"version": engine.pop(name)} for name in ("torch", "triton"))
    for package in (torch, triton):
        if package["version"] is None:
            package["install"] = _BRINGS_TORCH
    facts: dict[str, Any] = {
        "version": __version__,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "platform": {"system": platform.platform(), "machine": platform.machine()},
        **engine,
        "torch": torch,
        "triton": triton,
        "gpus": _gpus(),
        "daemon": _daemon(environment),
        "folders": {"data": str(settings.data_dir), "config": str(settings.config_dir), "runtime": str(settings.runtime_dir)},
    }
    return facts | {"problems": list(_problems(facts, settings.data_dir))}


def _models(environment: Environment) -> list[dict[str, Any]]:
    """The installed models, as the child takes them."""
    from daemon.store import Store

    records = Store(environment.settings.data_dir).list()
    return [{"model": one.name, "architecture": one.info.architecture, "config": one.info.config} for one in records]


def _engine(models: list[dict[str, Any]]) -> dict[str, Any]:
    import msgspec

    from daemon.interpreter import python_module

    command = python_module("engine.doctor")
    try:
        done = subprocess.run(
            command,
            cwd=launch.PACKAGE_ROOT,
            input=msgspec.json.encode(models),
            stdout=subprocess.PIPE,
            timeout=_LIMIT_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=dict[str, Any])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise CavectlError(f"the engine could not be asked: {error}", hint="./install.sh installs it again") from error


def _gpus() -> list[dict[str, str]]:
    """NVIDIA GPUs as the driver's own tool names them; none where it is not there or fails."""
    names = ("name", "memory", "driver")
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _daemon(environment: Environment) -> dict[str, Any]:
    settings = environment.settings
    if not launch.answers(environment.client):
        return {"running": False, "socket": str(settings.socket)}
    return {"running": True, "socket": str(settings.socket), "pid": launch.record(settings).get("pid")}


def _has_backend(facts: dict[str, Any]) -> bool:
    return facts["native"]["state"] != "unavailable" or facts["torch"]["version"] is not None


def _problems(facts: dict[str, Any], data_dir: Path) -> Iterator[str]:
    if not _has_backend(facts):
        yield f"no backend can run a model: {facts['native']['why']}, and torch is not installed ({_BRINGS_TORCH})"
    elif facts["torch"]["version"] is None:
        for one in facts["falls_back_to_reference"]:
            yield f"{one['model']} needs torch, which is not installed ({_BRINGS_TORCH}): {'; '.join(one['why'])}"
    for one in facts["cannot_run"]:
        yield f"{one['model']} runs on no backend: {'; '.join(one['why'])}"
    if data_dir.exists() and not os.access(data_dir, os.W_OK | os.X_OK):
        yield f"{data_dir} cannot be written to"


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    cpu, native, daemon = facts["cpu"], facts["native"], facts["daemon"]
    rows = {
        "cavectl": facts["version"],
        "python": f"{facts['python']['version']}, {facts['python']['path']}",
        "platform": facts["platform"]["system"],
        "processor": f"{cpu['model']}, {cpu['physical_cores']} cores: {' '.join(cpu['flags']) or 'nothing that the kernels use'}",
        "native": _native_line(native),
        "compiler": facts["compiler"] or "none found (c++, g++ or clang++)",
        "torch": facts["torch"]["version"] or f"not installed, {_BRINGS_TORCH} brings it",
        "triton": facts["triton"]["version"] or f"not installed, {_BRINGS_TORCH} brings it",
        "GPUs": "; ".join(f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}" for gpu in facts["gpus"]) or "no NVIDIA GPU",
        "daemon": f"running, process {daemon['pid']}" if daemon["running"] else "not running",
        **facts["folders"],
    }
    yield from (f"{name:<11}{value}" for name, value in rows.items())
    slow = facts["falls_back_to_reference"]
    yield f"{'reference':<11}{'' if slow else 'no model falls back to it'}".rstrip()
    yield from (f"  {one['model']}: {'; '.join(one['why'])}" for one in slow)
    if facts["problems"]:
        yield ""
        yield "PROBLEMS"
        yield from (f"  {problem}" for problem in facts["problems"])


def _native_line(native: dict[str, Any]) -> str:
    if native["state"] != "ready":
        return f"{native['state']}: {native['why']}"
    return f"{native['used']} of {', '.join(native['isas'])}, {native['path']}"
