"""The thread pool by itself: native/pool_life.cpp, under the sanitizer of threads and without it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu import build
from tests.engine.kernels.cpu.native_driver import DRIVERS


@pytest.fixture(scope="module", params=["plain", "thread"])
def pool_life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = build.compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    target = tmp_path_factory.mktemp("pool") / "pool_life"
    flags = [*build.FLAGS, "-Werror", *(["-fsanitize=thread", "-g"] if request.param == "thread" else [])]
    sources = [str(DRIVERS / "pool_life.cpp"), str(build.SOURCES / "pool.cpp")]
    done = subprocess.run([*command, *flags, f"-I{build.SOURCES}", *sources, "-pthread", "-o", str(target)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return target


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_every_piece_is_done_once_and_after_the_phase_before(pool_life: Path, threads: int) -> None:
    done = subprocess.run([str(pool_life), str(threads), "1500"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    helped, ok = done.stdout.split()
    assert ok == "ok" and (int(helped) > 0) == (threads > 1)
