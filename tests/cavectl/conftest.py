"""A home of its own for every test of the command line, a fake daemon in it, and ways to run `python -m cavectl` there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cavectl.fake_daemon import FakeDaemon
from tests.fixtures.native_build import native_cache

ROOT = Path(__file__).parents[2]


@dataclass
class Home:
    """One user's world: no setting, file or socket of the real one is reachable from it."""

    path: Path
    environ: dict[str, str]

    @property
    def socket(self) -> Path:
        return Path(self.environ["CAVECTL_SOCKET"])

    @property
    def data_dir(self) -> Path:
        return Path(self.environ["CAVECTL_DATA_DIR"])

    def popen(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        command: list[str] = [sys.executable, "-m", "cavectl", *arguments]
        return subprocess.Popen(command, env=self.environ, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(
        self, *arguments: str, stdin: bytes | None = None, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command with its streams captured; without `stdin` there is nothing to read there."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        command = [sys.executable, "-m", "cavectl", *arguments]
        return subprocess.run(
            command, env=self.environ | dict(environ or {}), cwd=ROOT, capture_output=True, timeout=100, check=False, **given
        )


def make_home(folder: Path, **environ: str) -> Home:
    """A user's world in a folder, which must be short enough for a socket's path."""
    names = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
    folders = {name: folder / name.lower() for name in names}
    folders |= {"CAVECTL_DATA_DIR": folder / "data", "CAVECTL_RUNTIME_DIR": folder / "run"}
    for path in folders.values():
        path.mkdir(mode=0o700)
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR")}
    ours = {"CAVECTL_SOCKET": str(folder / "s"), "CAVECTL_PORT": "0", "TERM": "xterm", "CAVECTL_TEST_CACHE": native_cache()}
    return Home(folder, kept | {k: str(v) for k, v in folders.items()} | ours | environ)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path, PYTHONWARNINGS="error")


@pytest.fixture
def fake(home: Home) -> Iterator[FakeDaemon]:
    yield from FakeDaemon().listen(home.socket)
