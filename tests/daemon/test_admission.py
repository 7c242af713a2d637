"""The bound on waiting requests, and the guess of when to come back."""

from __future__ import annotations

import pytest

from daemon.admission import LONGEST_RETRY_S, Admission
from daemon.api.errors import Busy


def test_only_those_that_wait_count() -> None:
    admission = Admission(2)
    with admission.enter() as first, admission.enter():
        with pytest.raises(Busy) as full, admission.enter():
            pass
        assert full.value.code == "queue_full" and (admission.waiting, admission.active) == (2, 2)
        first.served()
        first.served()
        assert (admission.waiting, admission.active) == (1, 2)
        with admission.enter():
            assert admission.waiting == 2
    assert (admission.waiting, admission.active) == (0, 0)


def test_a_place_is_given_back_on_failure() -> None:
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(RuntimeError), admission.enter():
            raise RuntimeError
    assert admission.waiting == admission.active == 0


def test_retry_after_follows_the_waits() -> None:
    now = [0.0]
    admission = Admission(1, clock=lambda: now[0])

    def wait(seconds: float) -> int:
        with admission.enter(), pytest.raises(Busy) as full:
            now[0] += seconds
            with admission.enter():
                pass
        return full.value.retry_after_s

    assert wait(0.0) == 1
    for _ in range(30):
        wait(20.0)
    assert 18 <= wait(20.0) <= 20
    for _ in range(30):
        wait(10_000.0)
    assert wait(0.0) == LONGEST_RETRY_S
