"""What a comparison measured, the targets it is held against, and both as a table.

Owned here: the targets (ratios to llama.cpp on the same file, in the same run) and the verdicts. Not here: measuring. Invariant: a
row that was not measured is in the table and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.bench.table import Table
from engine.bench.timing import Spread

Verdict = Literal["met", "MISSED", "no target", "not measured"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio`: ours to theirs, taken within each round. `of` is what the bound is on: the ratio, or our figure itself."""

    work: str
    unit: str = "tok/s"
    ours: Spread | None = None
    theirs: Spread | None = None
    ratio: Spread | None = None
    least: float | None = None
    most: float | None = None
    of: Literal["ratio", "ours"] = "ratio"
    decimals: int | None = None  # that the table shows; None: by the size of the figure
    why: str = ""  # it was not measured

    @property
    def verdict(self) -> Verdict:
        held = self.ratio if self.of == "ratio" else self.ours
        if held is None:
            return "not measured"
        if self.least is None and self.most is None:
            return "no target"
        good = (self.least is None or held.median >= self.least) and (self.most is None or held.median <= self.most)
        return "met" if good else "MISSED"


@dataclass(frozen=True, slots=True)
class Target:
    """A speed test and what its ratio must be at least; `against`: which of llama.cpp's files."""

    test: str
    work: str
    least: float
    against: Literal["same", "q4_0"] = "same"


TARGETS = (
    Target("tg128", "decode 128", 1.8),
    Target("tg128", "decode 128, theirs on Q4_0", 1.25, "q4_0"),
    Target("pp128", "prefill 128", 5.0),
    Target("pp512", "prefill 512", 5.0),
    Target("pp128", "prefill 128, theirs on Q4_0", 2.0, "q4_0"),
    Target("pp512", "prefill 512, theirs on Q4_0", 2.0, "q4_0"),
    Target("tg64@4096", "decode at depth 4096", 3.0),
    Target("tg64x8", "8 sequences together", 3.0),
)
TESTS = tuple(dict.fromkeys(target.test for target in TARGETS))
HTTP_FIRST_MOST, CROWD_LEAST, CROWD_FIRST_MOST = 0.3, 4.0, 0.3
COLD_MOST_S = 1.0
PERPLEXITY_MOST_OF_REFERENCE, PERPLEXITY_MOST_OF_THEIRS, DIVERGENCE_MOST = 1.005, 1.003, 0.01
BUSY_LEAST_PERCENT = 55.0
MEMORY_ROOM_BYTES = 150_000_000


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of each round. A side that lacks a round lacks it at the end."""
    return [mine / other for mine, other in zip(ours, theirs, strict=False)]


def table(rows: Sequence[Row], notes: Sequence[str]) -> Table:
    columns = ("work", "ours", "llama.cpp", "unit", "ratio", "target", "verdict")
    whys = [f"{row.work}: {row.why}" for row in rows if row.why]
    return Table("CPU backend beside llama.cpp: median (least..most)", columns, [_cells(row) for row in rows], [*whys, *notes])


def _cells(row: Row) -> tuple[str, ...]:
    ours, theirs, ratio = (_figure(values, row.decimals) for values in (row.ours, row.theirs, row.ratio))
    return (row.work, ours, theirs, row.unit, ratio, _target(row), row.verdict)


def _figure(values: Spread | None, decimals: int | None) -> str:
    if values is None:
        return "-"
    digits = decimals
    if digits is None:
        digits = 0 if values.median >= 1000 else 1 if values.median >= 20 else 2 if values.median >= 0.1 else 5
    if values.count == 1:
        return f"{values.median:.{digits}f}"
    return f"{values.median:.{digits}f} ({values.least:.{digits}f}..{values.most:.{digits}f})"


def _target(row: Row) -> str:
    mark = "x" if row.of == "ratio" else ""
    if row.least is not None:
        return f">= {row.least:g}{mark}"
    return "-" if row.most is None else f"<= {row.most:g}{mark}"
