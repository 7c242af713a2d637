"""`python -m tests.daemon.scripted_daemon`: the real daemon process with the Probe as its application."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from daemon.__main__ import run
from daemon.config import resolve
from engine.errors import CavectlError


def load() -> Any:
    from tests.daemon.wire import Probe

    return Probe(resolve({}))


if __name__ == "__main__":
    os.umask(0o077)
    log = os.environ.get("PROBE_LOG_FILE")
    try:
        sys.exit(run(resolve({}), Path(log) if log else None, load))
    except CavectlError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        sys.exit(1)
