"""Builds the test programs of native/ against an instrumented library, and runs them.

Owned here: which sanitizers there are and how they are told to report. Library and programs are kept in the test cache, named by a
hash of sources and flags. Not here: what the programs do. A report of a sanitizer ends a program with a code that is not 0.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.kernels.cpu import build, lib

DRIVERS = Path(__file__).parent / "native"


@dataclass(frozen=True, slots=True)
class Sanitizer:
    flags: tuple[str, ...]
    options: Mapping[str, str]

    def program(self, name: str) -> Path:
        """native/<name>.cpp, built if it is not there yet."""
        command = build.compiler()
        if command is None:
            pytest.skip("there is no C++ compiler")
        library = build.cached_library(lib.cache_folder(), extra_flags=self.flags)
        sources = [DRIVERS / f"{name}.cpp", *sorted(DRIVERS.glob("*.h"))]
        digest = hashlib.sha256(b"\0".join([name.encode(), *(source.read_bytes() for source in sources)])).hexdigest()[:16]
        target = library.parent / f"{name}-{digest}"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / name
            link = (str(sources[0]), str(library), f"-Wl,-rpath,{library.parent}", f"-I{build.SOURCES}", "-o", str(made))
            done = subprocess.run([*command, *build.FLAGS, "-Werror", *self.flags, *link], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(made, target)
        return target

    def run(self, name: str, *arguments: object, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        command = [str(self.program(name)), *map(str, arguments)]
        environment = {**os.environ, **self.options}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)

    def passes(self, name: str, *arguments: object, seconds: float = 300) -> str:
        """What the program printed. It must end well and have nothing to report."""
        done = self.run(name, *arguments, seconds=seconds)
        assert done.returncode == 0, f"{name} {arguments}\n{done.stdout}{done.stderr}"[-8000:]
        assert not done.stderr
        assert done.stdout.endswith("ok\n")
        return done.stdout


MEMORY = Sanitizer(
    build.SANITIZERS,
    {
        # a size that nobody could have is refused as the system would, by std::bad_alloc
        "ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=1024",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
)
THREADS = Sanitizer(("-O1", "-fsanitize=thread", "-g"), {"TSAN_OPTIONS": "halt_on_error=1"})
