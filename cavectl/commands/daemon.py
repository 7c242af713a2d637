"""serve, daemon start, stop, status, logs: the background process as a process. What it does is daemon/'s business."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cavectl import launch
from cavectl.arguments import Json
from cavectl.environment import Environment
from cavectl.output import Console, duration
from engine.errors import CavectlError, InvalidRequest

_POLL_S = 0.05
_FOLLOW_POLL_S = 0.2


def serve(
    context: typer.Context,
    *,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; beyond loopback only with an API key.")] = "",
    port: Annotated[str, typer.Option(metavar="PORT", help="TCP port; 0: any free one; off: none.")] = "",
    socket: Annotated[str, typer.Option(metavar="PATH", help="Path of the Unix socket.")] = "",
    kv_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for each model's cache: 2GiB, 500MB, bytes.")] = "",
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help="What the cache is kept in: auto, float32, float16, int8.")] = "",
    threads: Annotated[str, typer.Option(metavar="N", help="Threads that compute; 0: one for each physical core.")] = "",
) -> None:
    """Run the daemon here, until Ctrl-C."""
    flags: list[str] = []
    path = str(Path(socket).absolute()) if socket else ""
    given = {"--host": host, "--port": port, "--socket": path, "--kv-memory": kv_memory, "--kv-dtype": kv_dtype}
    given |= {"--threads": threads}
    for name, value in given.items():
        if value:
            flags += [name, value]
    command = launch.daemon_command(*flags)
    _local(context.obj)
    os.chdir(launch.PACKAGE_ROOT)  # see launch: what `-m daemon` imports must not depend on where the person stands
    os.execv(command[0], command)  # noqa: S606


def start(context: typer.Context) -> None:
    """Start the daemon in the background."""
    environment: Environment = context.obj
    _local(environment)
    started = launch.ensure_daemon(environment.client, environment.settings, environment.console)
    environment.console.note("started" if started else "it runs already")


def stop(
    context: typer.Context,
    *,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the requests in flight.")] = False,
) -> None:
    """Stop the daemon, after the requests in flight."""
    environment: Environment = context.obj
    _local(environment)
    pid = launch.running_pid(environment.settings)
    if pid is None and launch.answers(environment.client):
        raise CavectlError("a daemon answers, but left no record of its process", hint="stop it where it was started")
    if pid is None:
        environment.console.note("no daemon runs")
        return
    os.kill(pid, signal.SIGTERM)
    if now:
        time.sleep(_POLL_S)
        _signal_again(pid)
    _wait_gone(environment, pid)
    environment.console.note("stopped")


def status(context: typer.Context, *, json: Json = False) -> int:
    """Say whether the daemon runs, and where.

    The exit code is 4 when it does not.
    """
    environment: Environment = context.obj
    facts = _facts(environment)
    if json:
        environment.console.document(facts)
    else:
        _print_status(environment.console, facts)
    return 0 if facts["running"] else 4


def logs(
    context: typer.Context,
    *,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, metavar="COUNT", help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines as they come.")] = False,
) -> None:
    """Show the daemon's log."""
    environment: Environment = context.obj
    _local(environment)
    path = launch.log_path(environment.settings)
    if not path.exists() and not follow:
        environment.console.note("there is no log yet")
        return
    seen = path.stat().st_size if path.exists() else 0
    for line in launch.tail(path, lines) if lines else ():
        environment.console.line(line)
    if follow:
        _follow(path, seen, environment.console)


def _local(environment: Environment) -> None:
    if environment.url:
        raise InvalidRequest("this command is about the local daemon, and --url names another", hint="leave --url out")


def _signal_again(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def _wait_gone(environment: Environment, pid: int) -> None:
    limit_s = environment.settings.drain_timeout_s + 10.0
    deadline = time.monotonic() + limit_s
    while launch.is_alive(pid):
        if time.monotonic() > deadline:
            message = f"the daemon (process {pid}) still runs after {limit_s:g} s"
            raise CavectlError(message, hint="cavectl daemon stop --now", code="timeout")
        time.sleep(_POLL_S)


def _facts(environment: Environment) -> dict[str, Any]:
    if not launch.answers(environment.client):
        stopping = None if environment.url else launch.running_pid(environment.settings)
        return {"running": False, "stopping": stopping, "socket": str(environment.settings.socket)}
    client = environment.client
    record = {} if environment.url else launch.record(environment.settings)
    version = client.get("/api/version").get("cavectl")
    return {"running": True, **record, "version": version, "models": [m["name"] for m in client.get("/api/ps")["models"]]}


def _print_status(console: Console, facts: dict[str, Any]) -> None:
    if not facts["running"]:
        console.line(f"not answering: process {facts['stopping']} is starting or stopping" if facts["stopping"] else "not running")
        return
    console.line("running")
    if facts.get("port"):
        facts["address"] = f"http://{facts.get('host')}:{facts['port']}"
    if isinstance(facts.get("started_at"), int | float):
        facts["uptime"] = duration(time.time() - facts["started_at"])
    facts["in memory"] = ", ".join(facts["models"]) or "no model"
    for name in ("version", "pid", "socket", "address", "uptime", "in memory"):
        if facts.get(name):
            console.line(f"  {name:<10}{facts[name]}")


def _follow(path: Path, seen: int, console: Console) -> None:
    """Print what is appended, until Ctrl-C. A file that got shorter, or was replaced, is read from its start."""
    identity = 0
    while True:
        try:
            facts = path.stat()
        except FileNotFoundError:
            facts = None
        if facts is not None:
            if facts.st_size < seen or (identity and facts.st_ino != identity):
                seen = 0
            identity = facts.st_ino
            seen += _print_from(path, seen, console)
        time.sleep(_FOLLOW_POLL_S)


def _print_from(path: Path, start: int, console: Console) -> int:
    """Print whole lines from a byte position on; gives how many bytes that were."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        console.line(line)
    return len(whole)
