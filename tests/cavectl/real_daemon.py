"""Homes in which the real daemon runs, started by the commands themselves, with a scripted engine; ended by pid."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cavectl.launch import is_alive
from tests.cavectl.conftest import ROOT, Home, make_home
from tests.daemon.scripted import WORKER, spelled

MODEL = "tiny/rand:latest"


@contextmanager
def real_home(**environ: str) -> Iterator[Home]:
    """A home whose daemon, if one was started, is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="cavectl-"))
    command = shlex.join([sys.executable, str(WORKER), str(folder / "plan.json")])
    home = make_home(folder, **{"PYTHONPATH": str(ROOT), "CAVECTL_WORKER_COMMAND": command} | environ)
    try:
        yield home
    finally:
        pid = recorded(home).get("pid")
        if pid is not None and is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


def recorded(home: Home) -> dict[str, Any]:
    """What the running daemon says about itself, {} when none runs."""
    path = Path(home.environ["CAVECTL_RUNTIME_DIR"]) / "daemon.json"
    return json.loads(path.read_text()) if path.exists() else {}


def script(home: Home, *pieces: str | bytes, **plan: Any) -> None:
    """What the model will say from now on."""
    log = home.path / "worker.log"
    log.unlink(missing_ok=True)
    (home.path / "plan.json").write_text(json.dumps({"scripts": [spelled(*pieces)], "log": str(log), **plan}))
    if recorded(home):
        home.run("stop", MODEL)


def worker_events(home: Home, kind: str) -> list[dict[str, Any]]:
    path = home.path / "worker.log"
    lines: Sequence[str] = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def until(condition: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
