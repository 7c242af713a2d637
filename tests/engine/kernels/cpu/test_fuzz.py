"""Damaged plans, packed files, steps and slots under the sanitizers: native/fuzz.cpp.

What is refused says why, what is taken runs, and a sanitizer has nothing to report.
"""

from __future__ import annotations

import pytest

from tests.engine.kernels.cpu.native_driver import MEMORY


def counts(printed: str) -> dict[str, int]:
    words = printed.splitlines()[0].split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.timeout(600)
def test_damage_is_refused_or_harmless_for_a_few_seconds() -> None:
    found = counts(MEMORY.passes("fuzz", 1, 4))
    assert min(found.values()) > 0, found  # each was refused at times, and taken at times


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3])
def test_damage_is_refused_or_harmless_for_a_minute(seed: int) -> None:
    found = counts(MEMORY.passes("fuzz", seed, 60))
    assert min(found.values()) > 20, found
