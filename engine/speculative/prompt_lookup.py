"""The prompt-lookup drafter: what followed the same tokens earlier in the prompt or the answer. Native; costs microseconds.

Not here: the search itself (engine/kernels/cpu/lookup.cpp). A sequence's text is handed over as it grows, the first time whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from engine.kernels.cpu.lib import load
from engine.speculative.tree import DraftTree, Limits

LEAST_MATCH = 2


class PromptLookup:
    """Implements engine.speculative.drafter.Drafter. Raises NativeUnavailable where there is no native library."""

    name = "lookup"

    def __init__(self) -> None:
        self._library = load().functions
        self._texts: dict[int, int] = {}  # sequence -> handle
        self._room = 0
        self._nodes = (ctypes.c_int32 * 0)()

    def propose(self, sequence: int, tokens: Sequence[int], limits: Limits) -> DraftTree:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = self._library.cavectl_lookup_open()
            if not text:
                raise MemoryError("the system gave no memory for a prompt's index")
        known = self._library.cavectl_lookup_size(text)
        fresh = tokens[known:]
        if self._room < limits.nodes:
            self._room, self._nodes = limits.nodes, (ctypes.c_int32 * (3 * limits.nodes))()
        count = self._library.cavectl_lookup_propose(
            text,
            (ctypes.c_int32 * len(fresh))(*fresh),
            len(fresh),
            limits.nodes,
            limits.depth,
            limits.branches,
            LEAST_MATCH,
            self._nodes,
        )
        if count < 0:
            raise MemoryError("the system gave no memory for a prompt's index")
        flat = self._nodes[: 3 * count]
        return DraftTree(flat[0::3], flat[1::3], flat[2::3])

    def forget(self, sequence: int) -> None:
        if text := self._texts.pop(sequence, None):
            self._library.cavectl_lookup_close(text)

    def close(self) -> None:
        for sequence in list(self._texts):
            self.forget(sequence)
