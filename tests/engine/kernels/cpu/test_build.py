"""How the library comes to be: once, named by its sources, for this machine's instruction sets, or not with one clear line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.kernels.cpu import build, lib
from engine.kernels.cpu.build import BuildError
from tests.daemon.process import ROOT

ABI = '#pragma GCC visibility push(default)\nextern "C" int cavectl_abi() {{ return {}; }}\n'


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of two small sources in place of the real ones, which take a minute."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "abi.cpp").write_text('extern "C" int cavectl_abi() { return 1; }\n')
    (sources / "isa_avx2.cpp").write_text(
        "#ifdef __x86_64__\n#include <immintrin.h>\n__m256i zero() { return _mm256_setzero_si256(); }\n#endif\n"
    )
    monkeypatch.setattr(build, "SOURCES", sources)
    return tmp_path


def test_a_library_is_built_once_and_again_when_a_source_changes(small: Path) -> None:
    first = build.cached_library(small / "cache")
    made = first.stat().st_ino
    assert build.cached_library(small / "cache") == first and first.stat().st_ino == made
    (small / "sources" / "more.h").write_text("// more\n")
    second = build.cached_library(small / "cache")
    assert second != first and first.exists()
    old = time.time() - 2 * build.UNUSED_S
    os.utime(first, (old, old))
    (small / "sources" / "more.h").write_text("// other\n")
    build.cached_library(small / "cache")
    assert not first.parent.exists() and second.exists()


def test_processes_that_race_build_once(small: Path) -> None:
    program = f"""
from pathlib import Path
from engine.kernels.cpu import build
build.SOURCES = Path({str(small / "sources")!r})
print(build.cached_library(Path({str(small / "cache")!r})).stat().st_ino)
"""
    racing = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    seen = {process.communicate(timeout=60)[0] for process in racing}
    assert len(seen) == 1 and all(process.returncode == 0 for process in racing)
    assert [p.name for p in (small / "cache").glob("native-*/*")] in ([build.NAME, "lock"], ["lock", build.NAME])


def test_files_of_other_machines_are_left_out() -> None:
    names = {machine: {unit.source.stem for unit in build.units(machine)} for machine in ("x86_64", "arm64", "riscv64")}
    assert {"isa_avx2", "isa_avx512", "isa_scalar"} <= names["x86_64"] and "isa_neon" not in names["x86_64"]
    assert {"isa_neon", "isa_scalar"} <= names["arm64"] and "isa_avx2" not in names["arm64"]
    assert not {"isa_avx2", "isa_avx512", "isa_neon"} & names["riscv64"]
    flags = {unit.source.stem: unit.flags for unit in build.units("amd64")}
    assert "-mavx512vnni" in flags["isa_avx512"] and flags["dispatch"] == flags["step"] == flags["isa_scalar"] == ()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_there_is_one_clear_line(small: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError) as caught:
        build.cached_library(small / "cache")
    assert "compiler" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(lib, "cached_library", lambda cache: build.cached_library(small / "cache"))
    with pytest.raises(lib.NativeUnavailable, match=r"the native backend is not built: .*compiler"):
        lib._find()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="there is no C"):
        build.cached_library(small / "cache")


def test_what_the_compiler_says_is_kept(small: Path) -> None:
    (small / "sources" / "wrong.cpp").write_text("int broken( {\n")
    with pytest.raises(BuildError, match="refused") as caught:
        build.cached_library(small / "cache")
    assert "wrong.cpp" in caught.value.output
    assert not list((small / "cache").glob(f"native-*/{build.NAME}"))


def test_a_library_of_another_abi_is_not_used(small: Path) -> None:
    (small / "sources" / "abi.cpp").write_text(ABI.format(99))
    with pytest.raises(lib.NativeUnavailable, match="ABI 99"):
        lib.load_from(build.cached_library(small / "cache"))
    (small / "nonsense").write_bytes(b"no library")
    (small / "sources" / "abi.cpp").write_text("int other() { return 1; }\n")
    with pytest.raises(lib.NativeUnavailable, match="ABI none"):
        lib.load_from(build.cached_library(small / "cache"))
    with pytest.raises(lib.NativeUnavailable, match="cannot be loaded"):
        lib.load_from(small / "nonsense")


def test_the_library_runs_what_this_machine_has() -> None:
    isas = lib.load().isas
    assert isas[-1] == "scalar" and len(set(isas)) == len(isas)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("avx2" in isas) == (" avx2 " in flags)
    assert ("avx512" in isas) == (" avx512_vnni " in flags and " avx512vl " in flags)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    build.compile_library(tmp_path / build.NAME, extra_flags=("-Werror",))


def test_flags_that_only_gcc_knows_are_for_gcc() -> None:
    (avx2,) = [unit for unit in build.units("x86_64") if unit.source.stem == "isa_avx2"]
    gcc = "g++ (Debian) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."
    assert build._flags_of(avx2, "Debian clang version 16.0.6") == avx2.flags
    assert build._flags_of(avx2, gcc) == (*avx2.flags, *build.GCC_FLAGS["isa_avx2"])
    others = [unit for unit in build.units("x86_64") if unit.source.stem not in build.GCC_FLAGS]
    assert all(build._flags_of(unit, gcc) == unit.flags for unit in others)
