from __future__ import annotations

import pytest

from engine.bench import latency, prefix, priorities, throughput, utilisation
from engine.bench.table import Table, figure, one
from engine.bench.timing import Spread
from tests.engine.bench.virtual_subject import said, virtual_subject


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    table = Table("Title", ("name", "n"), [("a", "1"), ("longer", "1000")], ["a note"])
    assert table.text().splitlines() == ["Title", "  name       n", "  a          1", "  longer  1000", "a note"]


def test_figures() -> None:
    assert figure(Spread(2.345, 1.0, 4.0, 3)) == "2.3 (1.0..4.0)"
    assert figure(Spread(2.375, 1.0, 4.0, 3), 2) == "2.38 (1.00..4.00)"
    assert one(3.14159) == "3.1"


def test_every_part_fills_all_columns_of_its_table() -> None:
    subject = virtual_subject()
    tables = [
        throughput.table(throughput.measure(subject, throughput.QUICK, 1, 0, said)),
        prefix.table(prefix.measure(subject, prefix.QUICK, 1, 0, said)),
        latency.table(latency.measure(subject, latency.QUICK, 1, 0, said)),
        priorities.table(priorities.measure(subject, priorities.QUICK, 1, 0, said)),
        utilisation.table(utilisation.measure(utilisation.Sizes(requests=9), 1, 0, said)),
    ]
    for table in tables:
        assert table.rows and {len(row) for row in table.rows} == {len(table.columns)}
        assert all(cell for row in table.rows for cell in row)
        assert table.title in table.text()


def test_a_short_row_is_found() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table("Title", ("a", "b"), [("1",)]).text()
