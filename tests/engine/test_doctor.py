"""`python -m engine.doctor`: the native library as it is, and which models go elsewhere and why."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from engine import doctor, platform
from engine.doctor import AskedModel, ModelReasons, Native
from engine.kernels.cpu import lib
from tests.fixtures.tiny_rand import tiny_rand

ROOT = Path(__file__).parent.parent.parent
CHECKED = "import sys, engine.doctor as d\ncode = d.main()\nsys.stderr.write(' '.join(sys.modules))\nsys.exit(code)"


def tiny(architecture: str = "llama") -> AskedModel:
    return AskedModel("tiny:latest", architecture, tiny_rand().config)


def test_it_imports_no_torch_and_says_what_the_library_is() -> None:
    lib.load()  # built, if nobody did before
    asked = msgspec.json.encode([tiny(), tiny("mistral")])
    done = subprocess.run([sys.executable, "-c", CHECKED], cwd=ROOT, input=asked, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy", "asyncio", "cavectl", "daemon"} & {m.split(".")[0] for m in done.stderr.decode().split()}
    answer = json.loads(done.stdout)
    library = lib.load()
    assert answer["native"] == {
        "state": "ready",
        "path": str(library.path),
        "isas": list(library.isas),
        "used": library.isas[0],
        "why": "",
    }
    assert answer["falls_back_to_reference"] == [] and answer["cannot_run"] == []
    assert answer["torch"] == metadata.version("torch")


def test_a_library_that_is_not_built_yet_is_not_built_by_asking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path)
    assert doctor.report([tiny()]).native == Native(state="not built", why="it is built when the first model is loaded")
    assert not list(tmp_path.iterdir()) and not doctor.report([tiny()]).falls_back_to_reference


def test_without_a_compiler_every_model_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    report = doctor.report([tiny()])
    why = "the native backend is not built: there is no C++ compiler (c++, g++ or clang++)"
    assert report.native == Native(state="unavailable", why=why) and report.compiler is None
    assert report.falls_back_to_reference == [ModelReasons("tiny:latest", [why])]


def test_reasons_are_those_of_the_native_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "unsupported", lambda spec, kv_dtype: ["capped logits", f"a cache of {kv_dtype}"])
    report = doctor.report([tiny()])
    does_not = "the cpu backend does not have"
    expected = ModelReasons("tiny:latest", [f"{does_not} capped logits", f"{does_not} a cache of float16"])
    assert report.falls_back_to_reference == [expected]


def test_a_model_of_no_family_runs_nowhere() -> None:
    report = doctor.report([tiny("frobnicator")])
    assert report.falls_back_to_reference == []
    assert report.cannot_run == [ModelReasons("tiny:latest", ["model type 'frobnicator' is not supported"])]


def test_the_processor_is_named() -> None:
    name, flags = platform.cpu_model()
    words = set(Path("/proc/cpuinfo").read_text().split())
    assert name
    assert set(flags) == set(platform.ISA_FLAGS) & words
