"""What the engine asks of the system."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from engine import platform
from tests.fixtures.worker_peer import ROOT


def _python(prepare: str, call: str) -> str:
    """What `platform.call()` gives in a process that did `prepare` first."""
    code = f"{prepare}; from engine import platform; print(platform.{call}())"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= platform.physical_cores() <= len(os.sched_getaffinity(0))
    assert _python("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "physical_cores") == "1"


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    assert 0 < platform.available_memory_bytes() <= psutil.virtual_memory().total


def test_an_address_space_limit_counts() -> None:
    limit = 4 << 30
    prepare = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))"
    assert 0 < int(_python(prepare, "available_memory_bytes")) < limit


def test_a_parent_is_gone_when_it_is_another() -> None:
    assert not platform.parent_gone(0)
    assert not platform.parent_gone(os.getppid())
    assert platform.parent_gone(os.getpid())
