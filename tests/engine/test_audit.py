"""When the accounts are checked: after changes, at intervals, and where it is not felt."""

from __future__ import annotations

import pytest

from engine.audit import FELT_S, LONGEST_WAIT_S, Audit


class Checks:
    """A check that takes `took_s` by its own watch, and finds what it is told to find."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.took_s, self.now, self.wrong = took_s, 0.0, False
        self.count = 0
        self.audit = Audit(self, 1.0, lambda: self.now)

    def __call__(self) -> None:
        self.count += 1
        self.now += self.took_s
        assert not self.wrong, "made up"

    def at(self, now: float, *, idle: bool = False) -> int:
        self.audit.changed()
        self.audit.tick(now, idle=idle)
        return self.count


def test_at_most_once_an_interval_and_only_after_a_change() -> None:
    checks = Checks()
    assert [checks.at(now) for now in (10.0, 10.5, 10.9, 11.0, 11.5, 30.0)] == [1, 1, 1, 2, 2, 3]
    assert checks.audit.tick(100.0, idle=True) is None and checks.count == 3
    checks.audit.changed()
    assert checks.audit.tick(30.5, idle=True) == 31.0, "the time of the next one"


def test_a_long_check_is_spared_for_long() -> None:
    checks = Checks(took_s=0.009)
    assert [checks.at(now) for now in (0.0, 0.8, 1.0, 1.01)] == [1, 1, 2, 2]
    checks = Checks(took_s=0.009 * 10)
    assert [checks.at(now, idle=True) for now in (0.0, 8.9, 9.0)] == [1, 1, 2]


def test_a_check_that_would_be_felt_waits_for_a_moment_without_work() -> None:
    checks = Checks(took_s=2 * FELT_S)
    assert checks.at(0.0) == 1, "the first shows how long it takes"
    assert [checks.at(now) for now in (5.0, 30.0, LONGEST_WAIT_S - 0.1)] == [1, 1, 1]
    assert checks.at(LONGEST_WAIT_S) == 2, "but not for ever"
    assert checks.at(LONGEST_WAIT_S + 5.0, idle=True) == 3


def test_what_is_wrong_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks()
    checks.wrong = True
    assert checks.at(0.0) == 1 and checks.audit.errors == 1
    assert "made up" in caplog.text
    checks.wrong = False
    assert checks.at(1.0) == 2 and checks.audit.errors == 1
