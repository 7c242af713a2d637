"""`cavectl doctor`: what it says of this installation, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cavectl.commands import doctor
from cavectl.environment import Environment
from daemon.store import Store, StoreSettings
from engine.kernels.cpu.lib import load
from tests.cavectl.conftest import Home
from tests.fixtures.gguf_writer import byte_vocabulary, gguf_bytes, llama_gguf
from tests.fixtures.tiny_rand import tiny_rand


@pytest.fixture
def model(home: Home, tmp_path: Path) -> str:
    """An installed model."""
    tiny = tiny_rand()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(llama_gguf(tiny.config, tiny.tensors, byte_vocabulary(320))))
    store = Store(home.data_dir, settings=replace(StoreSettings(), pack=False))
    return asyncio.run(store.import_path(path, "tiny")).name


def test_all_is_well_and_no_daemon_was_started(home: Home, model: str) -> None:
    library = load()
    done = home.run("doctor", "--json")
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    facts = json.loads(done.stdout)
    assert facts["python"]["path"] == sys.executable
    assert facts["native"]["used"] == library.isas[0] and facts["native"]["path"] == str(library.path)
    assert facts["falls_back_to_reference"] == facts["cannot_run"] == facts["problems"] == []
    assert facts["torch"]["version"] and "install" not in facts["torch"]
    assert facts["daemon"] == {"running": False, "socket": str(home.socket)}
    assert facts["folders"]["data"] == str(home.data_dir)
    assert not (home.data_dir / "logs").exists()


def test_without_a_compiler_the_reason_is_said_and_models_fall_back(home: Home, model: str) -> None:
    done = home.run("doctor", environ={"CXX": "/no/such/compiler"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("native") and "unavailable: " in line and "/no/such/compiler" in line]
    assert [line for line in lines if line.startswith(f"  {model}: ") and "/no/such/compiler" in line]


def test_gpus_are_those_that_the_driver_names(home: Home) -> None:
    folder = home.path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text('#!/bin/sh\necho "Some GPU, 81559 MiB, 575.1"\necho "Other GPU, 1 MiB, 575.1"\n')
    (folder / "nvidia-smi").chmod(0o755)
    done = home.run("doctor", "--json", environ={"PATH": f"{folder}:{os.environ['PATH']}"})
    first, second = json.loads(done.stdout)["gpus"]
    assert first == {"name": "Some GPU", "memory": "81559 MiB", "driver": "575.1"} and second["name"] == "Other GPU"


def healthy() -> dict[str, Any]:
    """What the engine's child says where all is well."""
    return {
        "cpu": {"model": "X", "flags": ["avx2"], "physical_cores": 2},
        "compiler": None,
        "torch": None,
        "triton": None,
        "native": {"state": "ready", "path": "/l.so", "isas": ["avx2", "scalar"], "used": "avx2", "why": ""},
        "falls_back_to_reference": [],
        "cannot_run": [],
    }


LIST = [{"model": "m:1", "why": ["because"]}]
ABSENT = {"state": "unavailable", "path": "", "isas": [], "used": "", "why": "no compiler"}


@pytest.mark.parametrize(
    ("changed", "code", "problem"),
    [
        ({}, 0, ""),
        ({"native": ABSENT, "torch": "2.13"}, 0, ""),
        ({"falls_back_to_reference": LIST, "torch": "2.13"}, 0, ""),
        ({"native": ABSENT}, 8, "no backend can run a model: no compiler, and torch is not installed (./install.sh --with-torch)"),
        ({"falls_back_to_reference": LIST}, 1, "m:1 needs torch, which is not installed (./install.sh --with-torch): because"),
        ({"cannot_run": LIST}, 1, "m:1 runs on no backend: because"),
    ],
)
def test_the_exit_code_says_whether_models_can_run(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    changed: dict[str, Any],
    code: int,
    problem: str,
) -> None:
    for name in ("DATA", "CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"CAVECTL_{name}_DIR", str(tmp_path / name))
    monkeypatch.setattr(doctor, "_engine", lambda models: healthy() | changed)
    context = cast(Any, SimpleNamespace(obj=Environment()))
    assert doctor.doctor(context) == code
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert (f"  {problem}" in lines) == bool(problem) == ("PROBLEMS" in lines)
    if "torch" not in changed:
        assert "torch      not installed, ./install.sh --with-torch brings it" in lines


def test_another_machine_is_not_looked_into(home: Home) -> None:
    done = home.run("--url", "http://127.0.0.1:1", "doctor")
    assert done.returncode == 2 and b"leave --url out" in done.stderr
