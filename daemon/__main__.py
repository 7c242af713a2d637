"""`python -m daemon`: settings, locks and sockets first, then the event loop, and only then anything heavy.

Exit codes: 0 after a drain, 1 for an error, 2 for settings that cannot be used, 128 + signal when a second signal cut the drain
short. Messages go to stderr until the log is open.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from daemon import __version__
from daemon.config import Settings, resolve

if TYPE_CHECKING:
    from daemon.lifecycle import Presence
    from daemon.logs import LogWriter
    from daemon.server import Application, DaemonServer

USAGE_CODES = frozenset({"invalid_request", "unknown_field", "unsupported"})


def main(argv: Sequence[str] | None = None) -> int:
    os.umask(0o077)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    arguments = _parser().parse_args(argv)
    flags = {name: value for name, value in vars(arguments).items() if name != "log_file"}
    from engine.errors import CavectlError

    try:
        return run(resolve(flags), Path(arguments.log_file) if arguments.log_file else None)
    except CavectlError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2 if error.code in USAGE_CODES else 1


def run(settings: Settings, log_file: Path | None, load: Callable[[], Application] | None = None) -> int:
    """Serves what `load` gives (None: daemon/app.py) until a signal says otherwise. Raises CavectlError when it cannot begin."""
    from daemon.lifecycle import Presence, make_private_dir
    from daemon.logs import set_up

    with Presence(settings, __version__) as presence:
        if log_file is not None:
            make_private_dir(log_file.parent)
        writer = set_up(log_file, settings.log_level)
        signals = _Signals(presence, writer)
        try:
            return _serve(settings, presence, signals, load)
        finally:
            writer.close()


def _serve(settings: Settings, presence: Presence, signals: _Signals, load: Callable[[], Application] | None) -> int:
    import asyncio
    import logging

    import uvloop

    from daemon.server import load_application, serve

    log = logging.getLogger("daemon")
    tcp = f" and {settings.host}:{presence.port}" if presence.tcp else ""
    log.info("daemon %s, pid %d, on %s%s", presence.version, os.getpid(), settings.socket, tcp)
    listeners = [listener for listener in (presence.unix, presence.tcp) if listener is not None]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        started = runner.run(serve(settings, listeners, signals.attach, load or load_application))
    log.info("daemon stopped")
    return 0 if started else 1


class _Signals:
    """SIGTERM and SIGINT drain, and end the process at once when they come again; SIGHUP opens the log anew."""

    def __init__(self, presence: Presence, writer: LogWriter) -> None:
        self._presence, self._writer = presence, writer
        self._server: DaemonServer | None = None
        self._told = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        signal.signal(signal.SIGHUP, self._reopen)

    def attach(self, server: DaemonServer) -> None:
        self._server = server
        server.should_exit = self._told

    def _end(self, number: int, _frame: FrameType | None) -> None:
        if self._told:
            self._presence.remove()
            os._exit(128 + number)
        self._told = True
        if self._server is not None:
            self._server.stop()

    def _reopen(self, _number: int, _frame: FrameType | None) -> None:
        self._writer.reopen()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m daemon", description="The cavectl daemon.", allow_abbrev=False)
    parser.add_argument("--socket", help="path of the Unix socket")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", help="TCP port; 0: any free one; off: none (default 11435)")
    parser.add_argument("--data-dir", help="where models and logs are kept")
    parser.add_argument("--kv-memory", dest="kv_memory_bytes", metavar="SIZE", help="memory for each model's cache, e.g. 2GiB")
    parser.add_argument("--kv-dtype", metavar="TYPE", help="what the cache is kept in: auto (default), float32, float16, int8")
    parser.add_argument("--threads", metavar="N", help="threads that compute; 0: one for each physical core (default)")
    parser.add_argument("--log-file", help="write the log there instead of stderr")
    parser.add_argument("--log-level", help="debug, info, warning or error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
