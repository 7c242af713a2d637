"""Tables as plain text: columns as wide as their widest cell, the first to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.bench.timing import Spread


@dataclass(frozen=True, slots=True)
class Table:
    """`notes` stand below, a line each."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = field(default=())

    def text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([self.title, *(_line(line, widths) for line in lines), *self.notes]) + "\n"


def one(value: float) -> str:
    """With one digit after the point."""
    return f"{value:.1f}"


def figure(values: Spread, digits: int = 1) -> str:
    """Median, and from where to where the repeats went."""
    return f"{values.median:.{digits}f} ({values.least:.{digits}f}..{values.most:.{digits}f})"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = (
        cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  " + "  ".join([first, *others])
