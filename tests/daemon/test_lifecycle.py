"""One daemon per socket and per data folder, stale files, odd environments, and how a daemon ends: with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon.lifecycle import Lock, Presence
from engine.errors import CavectlError
from tests.daemon.process import ROOT, Daemon, running, start
from tests.daemon.wire import PATIENCE_S, Client, settings_in, until


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def listening_ports() -> set[int]:
    """TCP ports on which anything in this network namespace listens."""
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                ports.add(int(local.split(":")[1], 16))
    return ports


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:
            continue
    return {link[8:-1] for link in links if link.startswith("socket:[")}


@pytest.mark.timing
@pytest.mark.parametrize("module", ["daemon", "tests.daemon.scripted_daemon"])
def test_health_is_answered_soon_after_the_start(tmp_path: Path, module: str) -> None:
    """In processor time, which is wall time on an idle machine: nothing before /health waits for anything."""
    with running(tmp_path, module=module) as daemon:
        used = psutil.Process(daemon.process.pid).cpu_times()
        assert (used.user + used.system) * 1000 < 400


def test_what_a_running_daemon_shows_and_leaves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(tmp_path) as daemon:
        shown = daemon.shown
        assert shown["pid"] == daemon.process.pid and shown["socket"] == str(run / "daemon.sock")
        assert shown["host"] == "127.0.0.1" and shown["port"] > 0 and shown["version"] and time.time() - shown["started_at"] < 60
        for kind in ("unix", "tcp"):
            with daemon.client(kind) as client:
                assert client.get("/health").json == {"status": "ok"}
        assert sorted(path.name for path in run.iterdir()) == ["daemon.json", "daemon.sock", "daemon.sock.lock"]
        assert [mode(path) for path in (run, tmp_path / "data")] == [0o700, 0o700]
        assert {mode(path) for path in run.iterdir()} == {0o600}
        assert daemon.end() == 0
    assert not list(run.iterdir()) and not list((tmp_path / "data").iterdir())


def test_only_the_configured_listener_is_open(tmp_path: Path) -> None:
    with running(tmp_path, module="daemon") as daemon:
        until(lambda: ready(daemon))
        owned = set()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in sockets_of(daemon.process.pid) and fields[3] == "0A":
                    owned.add((name, fields[1]))
        assert owned == {("tcp", f"0100007F:{daemon.shown['port']:04X}")}
        udp = {line.split()[9] for name in ("udp", "udp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]}
        assert not udp & sockets_of(daemon.process.pid)


def ready(daemon: Daemon) -> bool | None:
    with daemon.client() as client:
        return client.get("/readyz").status == 200 or None


def test_no_tcp_when_it_is_off(tmp_path: Path) -> None:
    with running(tmp_path, env={"CAVECTL_PORT": "off"}) as daemon:
        shown = daemon.shown
        assert shown["port"] is None and shown["host"] is None
        inodes = sockets_of(daemon.process.pid)
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        assert not [row for row in rows if row[9] in inodes]


def test_second_daemon_names_the_first_and_touches_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        before = {path: (path.stat().st_ino, path.read_bytes() if path.is_file() else b"") for path in (tmp_path / "run").iterdir()}
        second = start(tmp_path, module="daemon")
        _, message = second.process.communicate(timeout=PATIENCE_S)
        assert second.process.returncode == 1
        assert f"a daemon is already running (pid {first.process.pid} on " in message and "Traceback" not in message
        after = {path: (path.stat().st_ino, path.read_bytes() if path.is_file() else b"") for path in (tmp_path / "run").iterdir()}
        assert before == after
        assert first.answers()


def test_same_data_with_another_socket_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        second = start(tmp_path, "--socket", str(tmp_path / "other" / "d.sock"), module="daemon")
        _, message = second.process.communicate(timeout=PATIENCE_S)
        assert second.process.returncode == 1 and f"pid {first.process.pid} on {tmp_path / 'run' / 'daemon.sock'}" in message
        assert not (tmp_path / "other" / "d.sock").exists()


def test_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = start(tmp_path, "--port", str(port), module="daemon")
        _, message = daemon.process.communicate(timeout=PATIENCE_S)
        assert daemon.process.returncode == 1
        assert message.startswith(f"error: port {port} on 127.0.0.1 is in use\nhint: ")
    assert not list((tmp_path / "run").iterdir())


def test_twenty_racing_starts_end_with_one_daemon(tmp_path: Path) -> None:
    daemons = [start(tmp_path) for _ in range(20)]
    try:
        until(lambda: sum(daemon.process.poll() is None for daemon in daemons) == 1 or None, 60)
        (winner,) = [daemon for daemon in daemons if daemon.process.poll() is None]
        until(winner.answers)
        assert winner.shown["pid"] == winner.process.pid
        assert {daemon.process.returncode for daemon in daemons if daemon is not winner} == {1}
    finally:
        for daemon in daemons:
            daemon.close()


def test_a_killed_daemon_is_replaced_even_if_its_pid_lives_again(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    run = tmp_path / "run"
    assert (run / "daemon.sock").exists() and (run / "daemon.sock.lock").exists()
    (run / "daemon.sock.lock").write_text(f"pid {os.getpid()} on x")  # a pid that is alive: ours
    (run / "daemon.json").write_text(json.dumps({"pid": os.getpid()}))
    with running(tmp_path) as second:
        assert second.shown["pid"] == second.process.pid
        assert second.end() == 0
    assert not list(run.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_a_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run" / "daemon.sock"
    path.parent.mkdir(mode=0o700)
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "precious").write_text("precious")
        path.symlink_to(tmp_path / "precious")
    daemon = start(tmp_path, module="daemon")
    _, message = daemon.process.communicate(timeout=PATIENCE_S)
    assert daemon.process.returncode == 1 and "exists and is not a socket" in message
    assert path.is_dir() if kind == "folder" else path.read_text() == "precious"


def test_a_lock_is_never_taken_on_a_removed_file(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    first.acquire("one")
    with pytest.raises(CavectlError, match="one") as caught:
        second.acquire("two")
    assert caught.value.code == "daemon_running"
    first.release()
    assert not (tmp_path / "lock").exists()
    second.acquire("two")
    assert (tmp_path / "lock").read_text() == "two"
    second.release()


def test_a_socket_that_another_put_there_is_not_removed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with Presence(settings, "1"):
        settings.socket.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(settings.socket))
        settings.daemon_file.write_text(json.dumps({"pid": 1}))
    assert settings.socket.exists() and settings.daemon_file.exists()
    other.close()


# Signals


def streams(daemon: Daemon, count: int, target: str) -> list[Client]:
    clients = [daemon.client("tcp" if index % 2 else "unix") for index in range(count)]
    for client in clients:
        client.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.head()[0] == 200
    return clients


def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        idle = daemon.client()
        until(lambda: idle.get("/readyz").status == 200 or None)
        clients = streams(daemon, 8, "/stream?n=100&ms=10")
        socket_path, port = daemon.shown["socket"], daemon.shown["port"]
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: idle.get("/readyz").status == 503 or None)
        assert idle.get("/health").json == {"status": "draining"}
        reply = idle.get("/v1/models")
        assert (reply.status, reply.code) == (503, "shutting_down") and idle.ended()
        for family, address in ((socket.AF_UNIX, socket_path), (socket.AF_INET, ("127.0.0.1", port))):
            with socket.socket(family) as newcomer:
                assert newcomer.connect_ex(address) != 0
        for client in clients:
            events = list(iter(client.chunk, b""))
            assert len(events) == 101 and events[-1] == b"data: [DONE]\n\n"
        assert daemon.process.wait(PATIENCE_S) == 0
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.timing
def test_sigterm_ends_streams_with_an_error_once_the_drain_time_is_over(tmp_path: Path) -> None:
    with running(tmp_path, env={"CAVECTL_DRAIN_TIMEOUT_S": "0.5"}) as daemon:
        clients = streams(daemon, 8, "/stream?ms=10")
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        for client in clients:
            events = list(iter(client.chunk, b""))
            assert b"shutting_down" in events[-1]
        assert daemon.process.wait(PATIENCE_S) == 0
        assert 0.4 < time.monotonic() - began < 3
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.timing
@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)]
)
def test_a_second_signal_ends_at_once(tmp_path: Path, first: int, second: int) -> None:
    with running(tmp_path) as daemon:
        clients = streams(daemon, 8, "/stream?ms=10")
        daemon.process.send_signal(first)
        time.sleep(0.3)
        assert daemon.process.poll() is None
        began = time.monotonic()
        assert daemon.end(second) == 128 + second
        assert time.monotonic() - began < 1
        for client in clients:
            with pytest.raises((EOFError, ConnectionError)):
                list(iter(client.chunk, b""))
    assert not list((tmp_path / "run").iterdir())
    with running(tmp_path) as again:
        assert again.answers()


def test_sighup_and_sigpipe_do_not_end_it_and_the_log_is_reopened(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "daemon.log"
    with running(tmp_path, env={"PROBE_LOG_FILE": str(log)}) as daemon:
        until(lambda: (log.exists() and log.read_text()) or None)
        assert mode(log) == 0o600 and mode(log.parent) == 0o700
        log.rename(tmp_path / "old.log")
        daemon.process.send_signal(signal.SIGPIPE)
        daemon.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        with daemon.client("tcp") as client:
            client.send(b"garbage\r\n\r\n")
            assert client.reply().status == 400
        assert (
            "400 invalid_request" in until(lambda: (log.exists() and log.read_text()) or None)
            or "not valid HTTP" in log.read_text()
        )
        assert daemon.end() == 0


def test_signals_while_starting_end_it(tmp_path: Path) -> None:
    with running(tmp_path, module="daemon") as daemon:
        assert daemon.end() == 0


# Environments


@pytest.mark.parametrize("umask", [0o000, 0o777, 0o022])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    with running(tmp_path, module="daemon", umask=umask) as daemon:
        assert mode(tmp_path / "run") == 0o700 and mode(tmp_path / "run" / "daemon.sock") == 0o600
        assert daemon.end() == 0


@pytest.mark.parametrize(
    "variables",
    [{"LANG": "C", "LC_ALL": "C"}, {"TMPDIR": "/nowhere"}, {"HOME": ""}, {"HOME": "/proc/nowhere"}, {"PATH": ""}],
    ids=str,
)
def test_odd_environments_work(tmp_path: Path, variables: dict[str, str]) -> None:
    with running(tmp_path, module="daemon", env=variables) as daemon:
        until(lambda: ready(daemon))
        with daemon.client() as client:
            assert client.get("/api/version").status == 200
        assert daemon.end() == 0


def test_unwritable_data_folder_is_named(tmp_path: Path) -> None:
    daemon = start(tmp_path, module="daemon", env={"CAVECTL_DATA_DIR": "/proc/nowhere/data"})
    _, message = daemon.process.communicate(timeout=PATIENCE_S)
    assert daemon.process.returncode == 1
    assert message.startswith("error: cannot make the folder /proc/nowhere/data: ") and "CAVECTL_DATA_DIR" in message


def test_long_path_gets_a_short_private_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    with running(folder, module="daemon") as daemon:
        path = Path(daemon.shown["socket"])
        assert len(os.fsencode(path)) <= 107 and mode(path.parent) == 0o700 and mode(path) == 0o600
        assert daemon.end() == 0
    assert not path.exists()
    path.parent.rmdir()


@pytest.mark.parametrize("how", ["link", "open", "owner"])
def test_a_short_folder_prepared_by_another_is_refused(tmp_path: Path, how: str) -> None:
    settings = settings_in(tmp_path / ("d" * 120))
    folder = settings.socket.parent
    try:
        if how == "link":
            (tmp_path / "theirs").mkdir()
            folder.symlink_to(tmp_path / "theirs")
        else:
            folder.mkdir()
            folder.chmod(0o777 if how == "open" else 0o700)
        if how == "owner":
            if os.getuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(folder, 12345, 12345)
        with pytest.raises(CavectlError, match=str(folder)), Presence(settings, "1"):
            pass
    finally:
        if folder.is_symlink():
            folder.unlink()
        else:
            folder.rmdir()


def test_failure_to_start_the_application_ends_the_daemon(tmp_path: Path) -> None:
    code = "import sys, daemon.app\nasync def startup(settings): raise RuntimeError('no')\ndaemon.app.startup = startup\n"
    code += "from daemon.__main__ import main\nsys.exit(main([]))"
    (tmp_path / "failing_daemon.py").write_text(code)
    env: dict[str, Any] = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    daemon = start(tmp_path, module="failing_daemon", env=env)
    _, message = daemon.process.communicate(timeout=PATIENCE_S)
    assert daemon.process.returncode == 1 and "the daemon cannot start" in message and message.count("\n") <= 4
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--port", "x"], ["--log-level", "loud"]])
def test_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    daemon = start(tmp_path, *arguments, module="daemon")
    _, message = daemon.process.communicate(timeout=PATIENCE_S)
    assert daemon.process.returncode == 2 and "Traceback" not in message


def test_nothing_heavy_is_imported_before_health() -> None:
    code = "import sys, daemon.__main__, daemon.server, daemon.lifecycle, daemon.logs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    assert not {"starlette", "torch", "numpy", "tokenizers", "jinja2", "httpx", "huggingface_hub", "safetensors"} & set(
        done.stdout.split()
    )
