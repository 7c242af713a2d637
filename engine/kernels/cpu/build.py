"""Compiles the C++ sources of this folder into one shared library.

Owned here: which file is compiled with which flags, and that two processes never build the same thing at once. Not here: loading
it (lib.py), and the package's build hook, which calls `compile_library` too. Invariant: a library is named by a hash of its
sources, flags and compiler, and appears under its name whole or not at all. Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
NAME = "libcavectl_cpu.so"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",  # a product and a sum are fused where the source says so, and nowhere else
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
)
SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")
COMPILERS = ("c++", "g++", "clang++")
UNUSED_S = 7 * 86400
# GCC otherwise loads everything a block of AVX2 code needs before it computes, into more registers than there are, and spills half.
GCC_FLAGS = {"isa_avx2": ("-fno-tree-ter",)}
ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "isa_avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
        "isa_avx512": (
            *("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
            *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        ),
    },
    "aarch64": {"isa_neon": ("-march=armv8.2-a+dotprod+fp16",)},
}
_MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


class BuildError(Exception):
    """There is no compiler, or it refused the sources: one line for a person in the message, the compiler's words in `output`."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True)
class _Unit:
    source: Path
    flags: tuple[str, ...]


def compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, else the first that is found."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return [found] if found else None


def units(machine: str | None = None) -> list[_Unit]:
    """What is compiled on this kind of machine: files of other instruction sets are left out."""
    isas = ISA_FLAGS.get(_MACHINES.get((machine or platform.machine()).lower(), ""), {})
    found = []
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.stem in isas:
            found.append(_Unit(source, isas[source.stem]))
        elif not source.stem.startswith("isa_") or source.stem == "isa_scalar":
            found.append(_Unit(source, ()))
    return found


def _flags_of(unit: _Unit, version: str) -> tuple[str, ...]:
    """`version`: what the compiler says of itself."""
    gcc = "Free Software Foundation" in version
    return (*unit.flags, *(GCC_FLAGS.get(unit.source.stem, ()) if gcc else ()))


def fingerprint(command: Sequence[str], flags: Sequence[str]) -> str:
    """16 hex digits over sources, flags, compiler and machine."""
    digest = hashlib.sha256()
    for path in sorted(p for p in SOURCES.iterdir() if p.suffix in (".cpp", ".h", ".inl")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    version = _run([*command, "--version"])
    digest.update("\0".join([*command, version, *flags, platform.machine(), str(ISA_FLAGS), str(GCC_FLAGS)]).encode())
    return digest.hexdigest()[:16]


def compile_library(target: Path, *, sanitize: bool = False, extra_flags: Sequence[str] = ()) -> Path:
    """Compiles everything into `target` (a file's path), in parallel over the cores; replaces what is there in one rename.

    Raises BuildError.
    """
    command = compiler()
    if command is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++)")
    flags = (*FLAGS, *(SANITIZERS if sanitize else ()), *extra_flags)
    version = _run([*command, "--version"])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            made = pool.map(lambda u: _compile(command, (*flags, *_flags_of(u, version)), u.source, Path(folder)), units())
            objects = list(made)
        library = Path(folder) / NAME
        _run([*command, *flags, "-shared", "-o", str(library), *map(str, objects)])
        os.replace(library, target)
    return target


def cached_path(cache: Path, *, sanitize: bool = False, extra_flags: Sequence[str] = ()) -> Path:
    """Where the library of the sources as they are now is in `cache`, or will be. Raises BuildError."""
    command = compiler()
    if command is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++)")
    key = fingerprint(command, (*FLAGS, *(SANITIZERS if sanitize else ()), *extra_flags))
    return cache / f"native-{key}" / NAME


def cached_library(cache: Path, *, sanitize: bool = False, extra_flags: Sequence[str] = ()) -> Path:
    """The library of the sources as they are now, built in `cache` if it is not there yet. Raises BuildError."""
    library = cached_path(cache, sanitize=sanitize, extra_flags=extra_flags)
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.parent / "lock"):
            if not library.exists():
                compile_library(library, sanitize=sanitize, extra_flags=extra_flags)
                _remove_unused(cache)
    os.utime(library)
    return library


def _remove_unused(cache: Path) -> None:
    for library in cache.glob(f"native-*/{NAME}"):
        if time.time() - library.stat().st_mtime > UNUSED_S:
            shutil.rmtree(library.parent, ignore_errors=True)


def _compile(command: Sequence[str], flags: Sequence[str], source: Path, folder: Path) -> Path:
    out = folder / f"{source.stem}.o"
    _run([*command, *flags, "-c", str(source), "-o", str(out)])
    return out


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the compiler {command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise BuildError("the compiler refused the native code", done.stderr)
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
