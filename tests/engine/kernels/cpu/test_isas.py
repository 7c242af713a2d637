"""Every instruction set's kernels against the scalar ones, to the bit: native/compare_isas.cpp, built once for each and run.

A machine needs not have what it checks: the ARM kernels, and the whole library, are cross-compiled and run under an emulator; AVX2
and AVX-512 are compiled against SIMDe, which needs neither. What is missing is said in the skip. Objects are kept in the test
cache, named by a hash of all that went into them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.kernels.cpu import build, lib

DRIVERS = Path(__file__).parent / "native"
WARNINGS = ("-Wno-psabi",)  # a note on passing vectors, of SIMDe, that concerns nobody who links no foreign code
ARM = platform.machine().lower() in ("arm64", "aarch64")
X86 = platform.machine().lower() in ("x86_64", "amd64")
pytestmark = pytest.mark.timeout(600)  # a compiler of its own for each, on a machine that others use
SHIPPED = pytest.param(("-Werror",), 20, id="shipped", marks=pytest.mark.full)  # compiled as it is installed, over more data


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler, and what runs its programs here."""

    command: tuple[str, ...]
    run: tuple[str, ...] = ()


def native() -> Toolchain:
    command = build.compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    return Toolchain(tuple(command))


def arm() -> Toolchain:
    if ARM:
        return native()
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no cross compiler aarch64-linux-gnu-g++ (package g++-aarch64-linux-gnu)")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("there is no emulator qemu-aarch64 (package qemu-user)")
    return Toolchain((compiler,), (emulator,))


@dataclass(frozen=True, slots=True)
class Builder:
    """Objects and programs of one toolchain; what was compiled before from the same sources and flags is taken as it is."""

    toolchain: Toolchain
    folder: Path
    flags: tuple[str, ...]

    def object(self, source: Path, *flags: str) -> Path:
        used = (*build.FLAGS, *WARNINGS, *self.flags, *flags, f"-I{build.SOURCES}", "-c", str(source))
        return self._made(f"{source.stem}-{_digest(used)}.o", used)

    def program(self, objects: Sequence[Path]) -> Path:
        static = ("-static",) if self.toolchain.run else ()  # no foreign C library is looked for when it runs
        used = (*static, "-pthread", *map(str, objects))
        return self._made(f"program-{_digest(used)}", used)

    def _made(self, name: str, arguments: Sequence[str]) -> Path:
        target = self.folder / name
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as private:
                made = Path(private) / name
                _call((*self.toolchain.command, *arguments, "-o", str(made)))
                os.replace(made, target)
        return target


def _builder(toolchain: Toolchain, cache: Path, *flags: str) -> Builder:
    digest = hashlib.sha256(build.fingerprint(toolchain.command, ()).encode())
    for path in sorted(p for p in DRIVERS.rglob("*") if p.is_file()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    folder = cache / f"isas-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return Builder(toolchain, folder, flags)


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


def _compare(builder: Builder, isa: str, rounds: int, flags: Sequence[str]) -> None:
    """Fails with the first values that differ from the scalar kernels'."""
    objects = [
        builder.object(build.SOURCES / "isa_scalar.cpp"),
        builder.object(build.SOURCES / f"isa_{isa}.cpp", *flags),
        builder.object(DRIVERS / "compare_isas.cpp", f"-DCAVECTL_TABLE=kernels_{isa}_table"),
    ]
    said = _call((*builder.toolchain.run, str(builder.program(objects)), str(rounds)))
    assert said.startswith(f"{isa}: 0 of ")
    assert int(said.split()[3]) > 500_000 * rounds, said


@pytest.mark.parametrize(("flags", "rounds"), [pytest.param(("-O1",), 2, id="quick"), SHIPPED])
def test_neon_equals_scalar_to_the_bit(test_cache: Path, flags: tuple[str, ...], rounds: int) -> None:
    builder = _builder(arm(), test_cache, *flags)
    _compare(builder, "neon", rounds, build.ISA_FLAGS["aarch64"]["isa_neon"])


def _arm_program(builder: Builder, driver: str) -> list[str]:
    """The command of native/<driver>.cpp with every file of the library."""
    objects = [builder.object(unit.source, *unit.flags) for unit in build.units("aarch64")]
    return [*builder.toolchain.run, str(builder.program([*objects, builder.object(DRIVERS / f"{driver}.cpp")]))]


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [pytest.param(("-O1",), 150, id="quick"), pytest.param(("-Werror",), 560, id="shipped", marks=pytest.mark.full)],
)
def test_small_models_live_the_same_life_on_neon_and_scalar(test_cache: Path, flags: tuple[str, ...], tokens: int) -> None:
    life = _arm_program(_builder(arm(), test_cache, *flags), "scenario")
    assert _call([*life, str(tokens), "scalar:1", "neon:1", "neon:3"]).endswith("ok\n")


def test_the_library_for_arm_asks_the_machine_for_dot_products(test_cache: Path) -> None:
    toolchain = arm()
    if not toolchain.run:
        pytest.skip("other machines are only seen under the emulator")
    emulator, program = _arm_program(_builder(toolchain, test_cache, "-O1"), "list_isas")
    assert _call([emulator, "-cpu", "max", program]) == "neon,scalar\n"
    assert _call([emulator, "-cpu", "cortex-a53", program]) == "scalar\n"  # ARMv8.0: no dot products


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_x86_kernels_over_emulated_instructions_equal_scalar(test_cache: Path, isa: str) -> None:
    if not X86:
        pytest.skip("this machine is no x86-64 machine")
    builder = _builder(native(), test_cache, "-O1")
    probe = (*builder.toolchain.command, "-E", "-x", "c++", "-include", "simde/x86/avx512.h", os.devnull)
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("there is no SIMDe (package libsimde-dev)")
    _compare(builder, isa, 2, (f"-I{DRIVERS / 'simde'}",))


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize(
    ("flags", "rounds"), [pytest.param(("-O2",), 2, id="quick"), SHIPPED]
)  # without -O2 the scalar side stalls
def test_x86_kernels_on_this_machine_equal_scalar(test_cache: Path, isa: str, flags: tuple[str, ...], rounds: int) -> None:
    if isa not in lib.load().isas:
        pytest.skip(f"this machine does not run {isa}")
    _compare(_builder(native(), test_cache, *flags), isa, rounds, build.ISA_FLAGS["x86_64"][f"isa_{isa}"])
