"""S32: log lines are one line each, and a destination that takes nothing costs lines, never time."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.logs import FILES_KEPT, LineFormatter, LogWriter, Throttle
from tests.daemon.process import running
from tests.daemon.wire import until


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("daemon.test_logs")
    logger.propagate = False
    logger.setLevel("INFO")
    yield logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()


HOSTILE = [
    'a\n{"level":"error"}',
    "\r\nfaked",
    "\x1b[31mred\x1b[0m",
    "\x9b2J",
    "nul\0",
    "\u2028sep\u2029",
    "\x7f",
    "tab\tbed",
    "\udc80 lone",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_record_is_one_line_of_printable_text(logger: logging.Logger, tmp_path: Path, text: str) -> None:
    logger.addHandler(writer := LogWriter(tmp_path / "log"))
    logger.info("said %s", text)
    logger.info("next")
    writer.close()
    raw = (tmp_path / "log").read_bytes()
    lines = raw.decode().splitlines()
    assert len(lines) == 2 and lines[1].endswith("next") and writer.dropped == 0
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw) and not re.search(r"[\x80-\x9f\u2028\u2029]", raw.decode())


def test_a_traceback_is_one_line_and_a_long_line_is_cut() -> None:
    formatter = LineFormatter()
    try:
        raise ValueError("x\ny")
    except ValueError:
        import sys

        record = logging.LogRecord("n", logging.ERROR, "", 0, "failed\n", None, sys.exc_info())
    line = formatter.format(record)
    assert "\n" not in line and "failed\\nTraceback" in line and "ValueError: x\\ny" in line
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR n ", line)
    assert len(formatter.format(logging.LogRecord("n", logging.INFO, "", 0, "x" * 10**6, None, None))) < 9000


def test_files_rotate_by_size(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(writer := LogWriter(tmp_path / "log", file_bytes=2000, queue_records=10_000))
    for index in range(1000):
        logger.info("line %d", index)
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == FILES_KEPT + 1 and all(path.stat().st_size <= 2000 for path in files)
    assert (tmp_path / "log").read_text().endswith("line 999\n")


def test_a_full_device_drops_lines_and_says_so_later(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    logger.addHandler(writer := LogWriter(path))
    for index in range(10):
        logger.info("lost %d", index)
    until(lambda: writer.dropped == 10 or None)
    path.unlink()
    writer.reopen()
    logger.info("kept")
    writer.close()
    lines = path.read_text().splitlines()
    assert lines[0].endswith("kept") and lines[1].endswith("10 log lines were lost")


@pytest.mark.timing
def test_a_destination_that_blocks_costs_nothing(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    logger.addHandler(writer := LogWriter(path, queue_records=50))  # opening a pipe nobody reads blocks for ever
    began = time.monotonic()
    for index in range(1000):
        logger.info("line %d", index)
    assert time.monotonic() - began < 1
    assert writer.dropped >= 940
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # lets the writer's thread go
    writer.close()
    os.close(reader)


@pytest.mark.timing
def test_a_daemon_with_a_stopped_reader_of_its_log_serves_on(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:  # nobody reads its stderr
        for _ in range(200):
            with daemon.client() as client:
                client.send(b"GET /fail HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.reply().status == 500
        began = time.monotonic()
        with daemon.client() as client:
            assert client.get("/health").status == 200
        assert time.monotonic() - began < 1


def test_a_flood_of_refusals_is_summed_up(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger.addHandler(Keep())
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    throttle = Throttle(logger, burst=3, period_s=10)
    for index in range(1000):
        throttle.warn("bad", f"bad {index}")
    throttle.warn("other", "other 0")
    assert seen == ["bad 0", "bad 1", "bad 2", "other 0"]
    now[0] = 111.0
    throttle.warn("bad", "bad again")
    assert seen[4:] == ["bad: 997 more like it", "bad again"]


def test_secrets_and_bodies_are_not_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {"PROBE_LOG_FILE": str(log), "CAVECTL_API_KEY": "hush-key", "HF_TOKEN": "hf_hush", "CAVECTL_LOG_LEVEL": "debug"}
    with running(tmp_path, env=env) as daemon:
        for kind in ("unix", "tcp"):
            for path in (b"/scope?prompt=hush-query", b"/fail?hush-query"):
                with daemon.client(kind) as client:
                    client.send(
                        b"POST %s HTTP/1.1\r\nHost: localhost\r\nx-api-key: hush-key\r\nContent-Length: 9\r\n\r\nhush-body" % path
                    )
                    client.reply()
            with daemon.client(kind) as client:
                client.send(b"POST / HTTP/1.1\r\nAuthorization: Bearer hush-key\r\nContent-Length: x\r\n\r\nhush-body")
                client.reply()
        assert daemon.end() == 0
    assert "daemon" in log.read_text() and "hush" not in log.read_text()


def test_the_writer_is_one_thread_that_ends(tmp_path: Path) -> None:
    before = threading.active_count()
    writer = LogWriter(tmp_path / "log")
    assert threading.active_count() == before + 1
    writer.close()
    assert threading.active_count() == before
