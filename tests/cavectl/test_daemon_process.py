"""The daemon as a process, started and stopped by commands: one of it whatever races, and a reason when it does not start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cavectl import launch
from cavectl.client import Client
from cavectl.output import Console
from daemon.config import resolve
from engine.errors import CavectlError
from tests.cavectl.conftest import ROOT, Home
from tests.cavectl.real_daemon import real_home, recorded, until


@pytest.fixture
def real() -> Iterator[Home]:
    with real_home() as home:
        yield home


def log_of(home: Home) -> str:
    return (home.data_dir / "logs" / "daemon.log").read_text()


def starts(home: Home) -> int:
    return sum(" pid " in line and " on " in line for line in log_of(home).splitlines() if "INFO daemon daemon" in line)


def test_twenty_commands_start_one_daemon(real: Home) -> None:
    processes = [real.popen("list", "--json") for _ in range(20)]
    for process in processes:
        out, error = process.communicate(timeout=100)
        assert (process.returncode, error) == (0, b"")
        assert json.loads(out) == {"models": []}
    assert starts(real) == 1
    assert launch.is_alive(recorded(real)["pid"])


def test_start_status_logs_stop(real: Home) -> None:
    assert real.run("daemon", "start").stderr == b"started\n"
    assert real.run("daemon", "start").stderr == b"it runs already\n"
    pid = recorded(real)["pid"]
    facts = json.loads(real.run("daemon", "status", "--json").stdout)
    assert facts["running"] is True
    assert (facts["pid"], facts["socket"], facts["models"]) == (pid, str(real.socket), [])
    assert f"http://127.0.0.1:{facts['port']}" in real.run("daemon", "status").stdout.decode()
    follower = real.popen("daemon", "logs", "-f", "-n", "1")
    assert follower.stdout is not None
    assert f"pid {pid}".encode() in follower.stdout.readline()
    stopped = real.run("daemon", "stop")
    assert (stopped.returncode, stopped.stderr) == (0, b"stopped\n")
    assert not launch.is_alive(pid)
    assert b"daemon stopped" in follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert real.run("daemon", "status").returncode == 4
    assert real.run("daemon", "logs", "-n", "1").stdout.endswith(b"daemon stopped\n")


def test_a_killed_daemon_is_replaced(real: Home) -> None:
    assert real.run("list").returncode == 0
    pid = recorded(real)["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not launch.is_alive(pid))
    assert real.socket.exists()
    assert real.run("list").returncode == 0
    assert recorded(real)["pid"] != pid


def test_a_start_that_fails_shows_the_log(real: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = real.run("list", environ={"CAVECTL_PORT": str(port)})
    assert (done.returncode, done.stdout) == (4, b"")
    said = done.stderr.decode()
    assert f"  error: port {port} on 127.0.0.1 is in use" in said
    assert "error: the daemon ended with code" in said
    assert "hint: cavectl daemon logs" in said


def test_a_daemon_that_never_answers_is_given_up(real: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def command(*_: str) -> list[str]:
        return [sys.executable, "-c", "import time; print('dozing', flush=True); time.sleep(600)"]

    def spawn(*arguments: object, **more: object) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(*arguments, **more))  # type: ignore[call-overload]
        return children[-1]

    monkeypatch.setattr(launch, "daemon_command", command)
    monkeypatch.setattr(launch, "subprocess", _Subprocess(spawn))
    settings = resolve(environ=real.environ | {"CAVECTL_STARTUP_TIMEOUT_S": "1"})
    with pytest.raises(CavectlError, match="did not answer within 1 s") as caught:
        launch.ensure_daemon(Client(socket_path=str(real.socket)), settings, Console(None, None, None, {}))
    assert caught.value.code == "daemon_unreachable"
    assert children[0].wait(30) == -signal.SIGTERM


class _Subprocess:
    DEVNULL = subprocess.DEVNULL

    def __init__(self, spawn: object) -> None:
        self.Popen = spawn


def test_a_folder_called_daemon_is_not_run_instead(real: Home) -> None:
    trap = real.path / "trap"
    (trap / "daemon").mkdir(parents=True)
    (trap / "daemon" / "__main__.py").write_text("open('sprung', 'w')\n")
    (trap / "daemon" / "__init__.py").write_text("")
    command = [sys.executable, "-P", "-m", "cavectl", "daemon", "start"]
    done = subprocess.run(command, cwd=trap, env=real.environ, capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"started\n")
    assert not list(trap.glob("sprung"))


def test_serve_runs_in_the_foreground(real: Home) -> None:
    process = real.popen("serve", "--port", "off")
    until(real.socket.exists)
    facts = json.loads(real.run("daemon", "status", "--json").stdout)
    assert (facts["pid"], facts["port"]) == (process.pid, None)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert real.run("serve", "--port", "many").returncode == 2


def test_commands_wait_for_a_daemon_that_drains(real: Home) -> None:
    """It keeps its locks until a request in flight is done; the next command starts another daemon then."""
    assert real.run("list").returncode == 0
    pid = recorded(real)["pid"]
    with socket.socket(socket.AF_UNIX) as busy:
        busy.connect(str(real.socket))
        busy.sendall(b"POST /api/show HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        until(lambda: real.run("daemon", "status").returncode == 0)
        os.kill(pid, signal.SIGTERM)
        waiting = real.popen("list", "--json")
        assert launch.is_alive(pid)
        busy.sendall(b'"a": "b"}')
        out, error = waiting.communicate(timeout=100)
    assert (waiting.returncode, error) == (0, b"")
    assert json.loads(out) == {"models": []}
    assert recorded(real)["pid"] != pid


def test_the_daemon_outlives_the_terminal(real: Home) -> None:
    command = [sys.executable, "-m", "cavectl", "daemon", "start"]
    process = subprocess.Popen(command, env=real.environ, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    process.wait(60)
    pid = recorded(real)["pid"]
    assert os.getsid(pid) == pid
    assert os.getpgid(pid) != process.pid


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_home_that_cannot_hold_anything_is_one_line(kind: str, home: Home) -> None:
    """/proc takes no folders, whoever asks; below a file there are none."""
    (home.path / "file").write_text("")
    folder = {"missing": "/proc/nope", "file": str(home.path / "file")}[kind]
    result = home.run("list", environ={"HOME": folder, "CAVECTL_DATA_DIR": f"{folder}/data"})
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 2
    assert result.stderr.startswith(b"error: cannot write to ") and b"hint: set HOME" in result.stderr
