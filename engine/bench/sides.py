"""The two sides of a comparison as child processes: each run is a process of its own, with the same number of threads.

A side's last line of stdout is one JSON document. What cannot be run raises NotMeasured with a line for the table: a comparison
goes on without a part that is missing. A busy neighbour is a process too, pinned to one core.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

RUN_TIMEOUT_S = 1800.0
THEIR_SCRIPT = Path(__file__).with_name("llamacpp_side.py")
_SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


class NotMeasured(Exception):
    """Why there is no figure, in one line."""


@dataclass(frozen=True, slots=True)
class Ours:
    model: str
    threads: int
    backend: str = "auto"
    kv_dtype: str = ""
    isa: str = ""

    def speeds(self, tests: Sequence[str], seed: int) -> dict[str, Any]:
        """The document of engine/bench/speed.py, one repeat of each test."""
        isa = ["--isa", self.isa] if self.isa else []
        return self._run("speed", "--tests", ",".join(tests), "--reps", "1", "--seed", str(seed), *isa)

    def perplexity(self, ids: Path) -> dict[str, Any]:
        return self._run("perplexity", "--ids", str(ids))

    def _run(self, module: str, *arguments: str) -> dict[str, Any]:
        options = ["--backend", self.backend, "--threads", str(self.threads)]
        options += ["--kv-dtype", self.kv_dtype] if self.kv_dtype else []
        return run([sys.executable, "-m", f"engine.bench.{module}", self.model, *arguments, *options])


@dataclass(frozen=True, slots=True)
class Theirs:
    """`python` has llama-cpp-python. `script` may be another one with the same interface."""

    python: str
    model: str
    threads: int
    script: Path = THEIR_SCRIPT
    extra_buffers: bool = True

    def speeds(self, tests: Sequence[str], seed: int) -> dict[str, float]:
        """Tokens per second of one run of each test."""
        seeded = ["--seed", str(seed)] if self.script == THEIR_SCRIPT else []
        document = self._run(self.script, "--only", ",".join(tests), "--reps", "1", "--threads", str(self.threads), *seeded)
        return {test: document[test]["median"] for test in tests}

    def tokenize(self, text: Path, count: int) -> list[int]:
        return self._run(THEIR_SCRIPT, "--tokenize", str(text), "--count", str(count))["ids"]

    def perplexity(self, ids: Path) -> dict[str, Any]:
        return self._run(THEIR_SCRIPT, "--perplexity", str(ids), "--threads", str(self.threads))

    def _run(self, script: Path, *arguments: str) -> dict[str, Any]:
        flags = [] if self.extra_buffers or script != THEIR_SCRIPT else ["--no-extra-buffers"]
        return run([self.python, str(script), self.model, *arguments, *flags])


def run(command: Sequence[str]) -> dict[str, Any]:
    """The JSON document in the last line of what a command prints. Raises NotMeasured."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=RUN_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from error
    try:
        document = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, Any])
    except (IndexError, msgspec.DecodeError):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise NotMeasured(f"ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}") from None
    if "error" in document:
        raise NotMeasured(document["error"]["message"])
    return document


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """One core that this process may use is kept busy by a process pinned to it."""
    if not hasattr(os, "sched_getaffinity"):
        raise NotMeasured("this system pins no process to a core")
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", _SPIN, str(core)], stdout=subprocess.PIPE) as spinner:
        try:
            assert spinner.stdout is not None
            spinner.stdout.readline()  # it runs, and where it should
            yield
        finally:
            spinner.kill()
