"""What counts as a worker's silence: ticks in which it could have spoken and somebody listened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from daemon.watchdog import SUSPECT_TICKS, TICKS, Silence, is_stopped
from tests.daemon.wire import until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_suspect_before_the_end_and_over_only_at_it(child: subprocess.Popen[bytes]) -> None:
    silence = Silence(60.0)
    assert silence.tick_s * TICKS == pytest.approx(60.0)
    seen = []
    for _ in range(TICKS):
        seen.append((silence.suspect, silence.over))
        silence.count(child.pid)
    assert seen == [(False, False)] * SUSPECT_TICKS + [(True, False)] * (TICKS - SUSPECT_TICKS) and silence.over
    silence.heard()
    assert not silence.suspect and not silence.over


def test_a_stopped_process_is_given_time_until_it_goes_on(child: subprocess.Popen[bytes]) -> None:
    silence = Silence(60.0)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: is_stopped(child.pid) or None)
    for _ in range(3 * TICKS):
        silence.count(child.pid)
    assert not silence.suspect
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: not is_stopped(child.pid) or None)
    for _ in range(TICKS):
        silence.count(child.pid)
    assert silence.over


def test_time_that_passes_between_ticks_is_nothing(child: subprocess.Popen[bytes]) -> None:
    """As after a suspended machine: however late a tick is, it is one."""
    silence = Silence(0.02)
    for _ in range(3):
        time.sleep(0.1)
        silence.count(child.pid)
    assert not silence.suspect


def test_a_process_that_is_gone_is_not_stopped(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert not is_stopped(child.pid)
