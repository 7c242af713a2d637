"""The two servers of a comparison, started for it and ended after it: our daemon in a folder of its own, and llama-server.

Our daemon knows no setting or model of the person's; the model is imported in place, so nothing is copied. Both listen on loopback.
Cold starts are here too, because they begin before there is a server.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.bench import http_load, timing
from engine.bench.http_load import Address

NAME = "bench/model:latest"
ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the packages
START_TIMEOUT_S, END_TIMEOUT_S = 120.0, 30.0
QUESTION = "Say hello."
BUILDS = "CAVECTL_TEST_CACHE"  # where a source tree keeps the native library: it shall not be built again


@dataclass(frozen=True, slots=True)
class Home:
    """Where our daemon lives while it is measured."""

    folder: Path
    environ: dict[str, str]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cavectl", *arguments]

    def run(self, *arguments: str) -> str:
        """A command to its end; its output. Raises RuntimeError with what it said when it fails."""
        done = subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise RuntimeError(f"cavectl {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
        return done.stdout


@contextlib.contextmanager
def our_home(model: str, threads: int) -> Iterator[Home]:
    """With the model imported, and packed if the backend packs; no daemon runs when the block begins, nor after it."""
    folder = Path(tempfile.mkdtemp(prefix="cavectl-bench-"))
    names = {"CAVECTL_DATA_DIR": "data", "CAVECTL_RUNTIME_DIR": "run", "XDG_CONFIG_HOME": "config"}
    for name in names.values():
        (folder / name).mkdir(mode=0o700)
    kept = {name: value for name, value in os.environ.items() if name == BUILDS or not name.startswith("CAVECTL_")}
    ours = {"CAVECTL_SOCKET": str(folder / "s"), "CAVECTL_PORT": "0", "CAVECTL_THREADS": str(threads)}
    home = Home(folder, kept | {name: str(folder / path) for name, path in names.items()} | ours)
    try:
        home.run("import", str(Path(model).resolve()), "--name", NAME)
        home.run("daemon", "stop")
        yield home
    finally:
        with contextlib.suppress(RuntimeError):
            home.run("daemon", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def our_server(home: Home) -> Iterator[Address]:
    home.run("daemon", "start")
    try:
        port = json.loads((home.folder / "run" / "daemon.json").read_text(encoding="utf-8"))["port"]
        yield Address(port, NAME)
    finally:
        home.run("daemon", "stop")


def our_worker_pid(home: Home) -> int:
    """The process that holds the model. Raises RuntimeError when none does."""
    models = json.loads(home.run("ps", "--json"))["models"]
    if not models or not models[0].get("pid"):
        raise RuntimeError("our daemon has no model in memory")
    return models[0]["pid"]


def our_cold_start_s(home: Home) -> float:
    """From the start of `cavectl run` without a daemon to the first byte of the answer."""
    start = timing.seconds()
    command = home.command("run", "-m", NAME, "--temp", "0", "--max-tokens", "4", QUESTION)
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, env=home.environ, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = timing.seconds() - start
        process.stdout.read()
    home.run("daemon", "stop")
    if not first:
        raise RuntimeError("`cavectl run` gave no answer")
    return seconds


@contextlib.contextmanager
def llama_server(program: str, model: str, threads: int, sequences: int, context_tokens: int) -> Iterator[Address]:
    """With room for so many sequences of so many tokens at once, and no cache of prompts."""
    command = [program, "-m", model, "--host", "127.0.0.1", "-t", str(threads), "-tb", str(threads)]
    command += ["-np", str(sequences), "-c", str(sequences * context_tokens), "--no-cache-prompt", "--cache-ram", "0"]
    port = _free_port()
    nothing = subprocess.DEVNULL
    with subprocess.Popen([*command, "--port", str(port)], stdin=nothing, stdout=nothing, stderr=nothing) as process:
        try:
            address = Address(port, "model")
            _wait(lambda: bool(http_load.ask(address, [1, 2], 1)), process)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def llama_cold_start_s(program: str, model: str, threads: int) -> float:
    """From the start of llama-server to the first token of a request, which is asked for as soon as the server takes one."""
    start = timing.seconds()
    with llama_server(program, model, threads, 1, 512):
        return timing.seconds() - start


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Poll, closely, until `ready` raises nothing."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if ready():
                return
        except (OSError, RuntimeError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start: {error}") from error
        time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
