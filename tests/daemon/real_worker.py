"""A real daemon with the real engine worker and a model of the test's own: nothing is scripted. For tests of the whole way."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.daemon.process import running
from tests.daemon.scripted import Scripted, ndjson, post
from tests.fixtures.tiny_tok import SPECIALS, byte_letters, tokens


@contextmanager
def real_daemon(model: Path, name: str, **variables: str) -> Iterator[Scripted]:
    """`variables`: settings, as CAVECTL_<NAME>."""
    folder = Path(tempfile.mkdtemp(prefix="cavectl-"))  # short: it holds a Unix socket
    try:
        env = {"CAVECTL_THREADS": "2"} | {f"CAVECTL_{key.upper()}": value for key, value in variables.items()}
        with running(folder, "--log-file", str(folder / "daemon.log"), module="daemon", env=env) as daemon:
            it = Scripted(daemon, folder)
            assert ndjson(it.post("/api/import", {"path": str(model), "name": name}).body)[-1]["status"] == "success"
            yield it
            assert "Traceback" not in it.log
    finally:
        shutil.rmtree(folder)


def send(daemon: Scripted, path: str, body: dict[str, Any]) -> Any:
    """A request with time for a load on a busy machine."""
    with daemon.client() as client:
        client.sock.settimeout(110)
        client.send(post(path, body))
        return client.reply()


def text_of(ids: Sequence[int]) -> str:
    """What a client must read of TinyTok's ids: control tokens are nothing, bytes that are no text show as U+FFFD."""
    letters, vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}, tokens()
    data = b"".join(bytes(letters[x] for x in vocabulary[number]) for number in ids if number >= len(SPECIALS))
    return data.decode("utf-8", "replace")
