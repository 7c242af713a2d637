"""The seam between the scheduler and whatever computes: native code, the reference, a GPU, ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.runtime.batch import StepInputs, StepOutputs

Ticket = Any  # opaque to the caller; collected in the order of submission


class Executor(Protocol):
    """`depth` steps may be submitted before the first is collected (reference and native 1, CUDA 2).

    `submit` or `collect` raises CavectlError for inputs that are refused and any other exception for a step that failed. After
    either, the cache still holds every token before its row's position, so the caller may try the same rows again, apart. Steps
    that were submitted after one that failed fail too, and change no state.
    """

    depth: int

    def submit(self, inputs: StepInputs) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepOutputs: ...

    def grow(self, pages: Sequence[int], held: Sequence[Sequence[int]]) -> None:
        """Have `pages` pages of each group from now on, at least as many as before; those in `held` keep what they hold.

        Called with nothing in flight. Raises OutOfMemory (or MemoryError), and then all is as it was.
        """
        ...

    def close(self) -> None: ...
