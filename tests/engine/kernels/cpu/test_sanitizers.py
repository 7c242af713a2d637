"""The native code under the sanitizers of addresses, undefined behaviour and threads: native/scenario.cpp, a life of small models.

The same program compares instruction sets and numbers of threads to the bit. That each sanitizer sees what it is there for is
tested too.
"""

from __future__ import annotations

import pytest

from engine.kernels.cpu.lib import load
from tests.engine.kernels.cpu.native_driver import MEMORY, THREADS

LONG = 560  # tokens: two pieces of attention, shared by threads


@pytest.mark.timeout(600)
def test_a_life_under_the_address_and_undefined_behaviour_sanitizers() -> None:
    MEMORY.passes("scenario", 150, "scalar:1", f"{load().isas[0]}:3")


@pytest.mark.timeout(600)
def test_the_address_sanitizer_sees_into_the_library() -> None:
    done = MEMORY.run("overrun", "memory")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_instruction_set_and_number_of_threads_in_a_long_life() -> None:
    MEMORY.passes("scenario", LONG, "scalar:1", *(f"{isa}:3" for isa in load().isas), f"{load().isas[0]}:2", seconds=800)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_threads_under_the_thread_sanitizer() -> None:
    THREADS.passes("scenario", LONG, *(f"{isa}:3" for isa in load().isas), seconds=800)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_thread_sanitizer_sees_a_race() -> None:
    done = THREADS.run("overrun", "race")
    assert done.returncode != 0
    assert "data race" in done.stderr
