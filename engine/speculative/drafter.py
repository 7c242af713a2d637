"""What proposes draft trees: the seam between speculation and the ways of guessing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.speculative.tree import DraftTree, Limits


class Drafter(Protocol):
    """Guesses for sequences, which it knows by number."""

    name: str

    def propose(self, sequence: int, tokens: Sequence[int], limits: Limits) -> DraftTree:
        """What may follow `tokens`, which only ever grow. No nodes: it has no idea."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence ended. Unknown ones are nothing to forget."""
        ...
