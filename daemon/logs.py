"""The daemon's log: one escaped line per record, written by a thread of its own (S32).

A record is put on a bounded queue and never waited for, so a full disk, a blocked pipe or a dead terminal costs log lines and no
request; what was lost is counted and said once the destination takes lines again. Files rotate by size. Prompts, tokens, keys and
query strings are never logged by this package.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import stat
import threading
import time
from pathlib import Path

QUEUE_RECORDS = 4096
LINE_CHARACTERS = 8192
FILE_BYTES = 8 * 2**20
FILES_KEPT = 3
STOP_TIMEOUT_S = 1.0
STDERR = 2

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO logger message`, with every control character escaped and a bounded length."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text.rstrip()}\n{self.formatException(record.exc_info)}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {record.name} {text}".translate(_ESCAPES)
        return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}[cut]"


class LogWriter(logging.Handler):
    """Queues records; its thread formats and writes them. `dropped` counts lines that reached no destination."""

    def __init__(self, file: Path | None, *, queue_records: int = QUEUE_RECORDS, file_bytes: int = FILE_BYTES) -> None:
        super().__init__()
        self.dropped = 0
        self.setFormatter(LineFormatter())
        self._queue: queue.Queue[logging.LogRecord | str] = queue.Queue(queue_records)
        self._destination = _Destination(file, file_bytes)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def reopen(self) -> None:
        """Closes the file; the next line opens it by name again (after an outside rotation)."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait("reopen")

    def close(self) -> None:
        """Writes what is queued, as far as the destination takes it within a second."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait("stop")
            self._thread.join(STOP_TIMEOUT_S)
        super().close()

    def _run(self) -> None:
        reported = 0
        while (item := self._queue.get()) != "stop":
            if isinstance(item, str):
                self._destination.close()
                continue
            written = self._write(item)
            if written and self.dropped > reported:
                lost, reported = self.dropped - reported, self.dropped
                self._write(logging.LogRecord(__name__, logging.WARNING, "", 0, f"{lost} log lines were lost", None, None))
        self._destination.close()

    def _write(self, record: logging.LogRecord) -> bool:
        try:
            self._destination.write(self.format(record).encode(errors="backslashreplace") + b"\n")
        except Exception:  # a message that cannot be formatted is as lost as one that cannot be written
            self.dropped += 1
            return False
        return True


class _Destination:
    """stderr, or a file that is set aside when it is full. Unbuffered, so that nothing is left to fail later."""

    def __init__(self, path: Path | None, limit_bytes: int) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._fd = STDERR if path is None else -1
        self._torn = False

    def write(self, line: bytes) -> None:
        if self._path is not None:
            self._make_room(self._path, len(line))
        data = b"\n" + line if self._torn else line
        written = os.write(self._fd, data)
        self._torn = 0 < written < len(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._path is not None and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _make_room(self, path: Path, size: int) -> None:
        if self._fd < 0:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        info = os.fstat(self._fd)
        if stat.S_ISREG(info.st_mode) and info.st_size > 0 and info.st_size + size > self._limit_bytes:
            self.close()
            for index in range(FILES_KEPT, 0, -1):
                older = path.with_name(f"{path.name}.{index - 1}") if index > 1 else path
                with contextlib.suppress(FileNotFoundError):
                    older.replace(path.with_name(f"{path.name}.{index}"))
            self._make_room(path, size)


class Throttle:
    """Lets through `burst` lines per kind and period, and then says how many it held back."""

    def __init__(self, logger: logging.Logger, *, burst: int = 5, period_s: float = 10.0) -> None:
        self._logger, self._burst, self._period_s = logger, burst, period_s
        self._kinds: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str) -> None:
        """`kind` comes from a small closed set, `message` may hold anything."""
        now = time.monotonic()
        since, count = self._kinds.get(kind, (now, 0))
        if now - since >= self._period_s:
            if count > self._burst:
                self._logger.warning("%s: %d more like it", kind, count - self._burst)
            since, count = now, 0
        if count < self._burst:
            self._logger.warning("%s", message)
        self._kinds[kind] = since, count + 1


def set_up(file: Path | None, level: str) -> LogWriter:
    """Makes the root logger write to `file`, or to stderr. Libraries speak from `warning` on."""
    writer = LogWriter(file)
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(logging.WARNING)
    for name in ("cavectl", "daemon", "engine"):
        logging.getLogger(name).setLevel(level.upper())
    return writer
