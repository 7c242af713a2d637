"""Daemon processes for tests: started with private folders, waited for, and ended by pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.daemon.wire import PATIENCE_S, Client, until
from tests.fixtures.native_build import native_cache

ROOT = Path(__file__).parents[2]


@dataclass
class Daemon:
    process: subprocess.Popen[str]
    folder: Path
    clients: list[Client] = field(default_factory=list)

    @property
    def shown(self) -> dict[str, Any]:
        return json.loads((self.folder / "run" / "daemon.json").read_text())

    def client(self, kind: str = "unix") -> Client:
        shown = self.shown
        self.clients.append(Client(shown["socket"] if kind == "unix" else ("127.0.0.1", shown["port"])))
        return self.clients[-1]

    def answers(self) -> bool | None:
        """True once /health is answered, None until then; fails if the process ended."""
        try:
            with self.client() as client:
                return client.get("/health").status == 200
        except (OSError, LookupError, ValueError, EOFError):
            assert self.process.poll() is None, self.process.communicate()[1]
            return None

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    def close(self) -> None:
        """Kills what still runs, and closes what the test held."""
        if self.process.poll() is None:
            self.process.kill()
        if self.process.stderr and not self.process.stderr.closed:
            self.process.communicate()
        for client in self.clients:
            client.close()


def environment(folder: Path, **variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CAVECTL_", "XDG_", "HF_"))}
    ours = {
        "CAVECTL_DATA_DIR": str(folder / "data"),
        "CAVECTL_CONFIG_DIR": str(folder / "config"),
        "CAVECTL_RUNTIME_DIR": str(folder / "run"),
        "CAVECTL_PORT": "0",
        "CAVECTL_TEST_CACHE": native_cache(),
    }
    return clean | ours | {name: value for name, value in variables.items() if value is not None}


def start(folder: Path, *arguments: str, module: str = "tests.daemon.scripted_daemon", **options: Any) -> Daemon:
    """Starts a daemon; `env` in options adds variables. Does not wait."""
    env = environment(folder, **options.pop("env", {}))
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    return Daemon(process, folder)


@contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[Daemon]:
    """A daemon that answers, killed at the end if it still runs."""
    daemon = start(folder, *arguments, **options)
    try:
        until(daemon.answers)
        yield daemon
    finally:
        daemon.close()
