"""The built package: the native library inside, for one platform; without a compiler a wheel for all, and one line that says so."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = {f"engine/kernels/cpu/{p.name}" for p in (ROOT / "engine/kernels/cpu").iterdir() if p.suffix in (".cpp", ".h", ".inl")}
LIBRARY = "engine/kernels/cpu/libcavectl_cpu.so"
LOAD = """
import sys
from engine.kernels.cpu.lib import NativeUnavailable, load
try:
    library = load()
except NativeUnavailable as error:
    sys.exit(f"{error.code}: {error.message}")
print(library.path, *library.isas, sep="\\n")
"""


def build(target: str, folder: Path, **environ: str) -> tuple[Path, str]:
    """What is built, and what was said on stderr."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()  # nothing temporary is left beside it
    return built, done.stderr


def load(wheel: Path, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The library of an unpacked wheel, loaded by a process that sees no other copy of the package."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=folder,
        env=kept | {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def in_the_source_tree() -> set[Path]:
    return {path for path in (ROOT / "engine").rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.timeout(500)
def test_a_wheel_has_the_library_and_its_sources(tmp_path: Path) -> None:
    before = in_the_source_tree()
    (tmp_path / "out").mkdir()
    wheel, said = build("wheel", tmp_path / "out")
    assert not {path for path in in_the_source_tree() - before if path.suffix in (".so", ".o")}
    assert "native" not in said
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY in names and set(names) >= SOURCES
    loaded = load(wheel, tmp_path / "in", CXX="/bin/false")
    assert loaded.returncode == 0, loaded.stderr
    path, *isas = loaded.stdout.split()
    assert path == str(tmp_path / "in" / LIBRARY) and isas[-1] == "scalar"


def test_a_wheel_is_built_when_the_compiler_fails(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    wheel, said = build("wheel", tmp_path / "out", CXX="/bin/false")
    ours = [line for line in said.splitlines() if "cavectl:" in line]
    assert ours == ["cavectl: this wheel has no native CPU backend: the compiler refused the native code"]
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY not in names and set(names) >= SOURCES
    missing = "the compiler /no/such cannot be run: No such file or directory"
    for compiler, why in (("/bin/false", "the compiler refused the native code"), ("/no/such", missing)):
        loaded = load(wheel, tmp_path / "in", CXX=compiler)
        assert loaded.returncode == 1
        (line,) = loaded.stderr.splitlines()
        assert line.startswith("device_unavailable: the native backend ") and why in line


def test_without_any_compiler_the_reason_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "bin").mkdir()
    wheel, said = build("wheel", tmp_path / "out", CXX="", PATH=str(tmp_path / "bin"))
    assert "cavectl: this wheel has no native CPU backend: there is no C++ compiler (c++, g++ or clang++)" in said.splitlines()
    loaded = load(wheel, tmp_path / "in", CXX="", PATH=str(tmp_path / "bin"))
    assert loaded.stderr.splitlines() == [
        "device_unavailable: the native backend is not built: there is no C++ compiler (c++, g++ or clang++)"
    ]


def test_the_source_archive_can_be_built_from(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    archive, _ = build("sdist", tmp_path / "out", CXX="/bin/false")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[1] for name in file.getnames()}
    assert names >= SOURCES | {"pyproject.toml", "engine/kernels/cpu/hatch_build.py", "engine/kernels/cpu/build.py"}
    assert not {name for name in names if name.endswith((".so", ".o"))}
