"""How a download or an import is shown: a bar on a terminal, a line for each stage elsewhere.

Takes the daemon's events {status, digest?, total?, completed?} as they come. Everything goes to stderr.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from cavectl.output import Console, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY = 0.1  # without a terminal: a line for each tenth


class ProgressView(Protocol):
    def show(self, event: dict[str, Any]) -> None: ...


@contextmanager
def progress_view(console: Console) -> Iterator[ProgressView]:
    """The view that fits stderr, closed when the block ends."""
    if console.stderr_is_terminal and not console.dumb:
        bars = _Bars(console.colour)
        with bars.progress:
            yield bars
    else:
        yield _Lines(console)


def follow(events: Iterable[dict[str, Any]], view: ProgressView) -> dict[str, Any]:
    """Show events to their end; gives back the last one."""
    last: dict[str, Any] = {}
    for event in events:
        view.show(event)
        last = event
    return last


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = ""
        self._shown = 0.0

    def show(self, event: dict[str, Any]) -> None:
        status, total, completed = _figures(event)
        part = completed / total if total else 0.0
        if status == self._status and part < min(self._shown + _LINE_EVERY, 1.0):
            return
        if status == self._status and self._shown >= 1.0:
            return
        self._status, self._shown = status, part
        self._console.note(f"{status}: {part:.0%} of {size(total)}" if total else status)


class _Bars:
    def __init__(self, colour: bool) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.table import Column

        # On a narrow terminal the name gives way; the figures stay whole.
        name = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        figures = [kind(table_column=Column(no_wrap=True)) for kind in (DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)]
        console = RichConsole(stderr=True, no_color=not colour)
        self.progress: Progress = Progress(name, BarColumn(bar_width=16), *figures, console=console, expand=True)
        self._tasks: dict[str, TaskID] = {}
        self._status = ""

    def show(self, event: dict[str, Any]) -> None:
        status, total, completed = _figures(event)
        if total:
            if status not in self._tasks:
                self._tasks[status] = self.progress.add_task(status, total=total)
            self.progress.update(self._tasks[status], completed=completed, total=total)
        elif status != self._status:
            self.progress.console.print(status, markup=False, highlight=False)
        self._status = status


def _figures(event: dict[str, Any]) -> tuple[str, int, int]:
    return str(event.get("status", "")), int(event.get("total") or 0), int(event.get("completed") or 0)
