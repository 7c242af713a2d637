"""Stop strings in streamed text.

Owns: the text held back because it may be the beginning of a stop string. Not here: stop token ids (the engine's).
The search is a Knuth-Morris-Pratt automaton per stop, so a character costs amortised constant time for each.
Invariant: what was let out never overlaps a stop string, and what is held back is the longest end of the text that is a proper
prefix of some stop string. The cut is at the stop complete first; of several complete at once, at the one that began first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StopResult:
    text: str  # to let out now
    stopped: str | None = None  # the stop string that was found; nothing follows


class StopMatcher:
    """`include`: the stop string itself is let out too. An empty stop string is refused: it would stop everything."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise InvalidRequest("a stop string is empty", hint="leave it out, or give at least one character")
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        if self._stopped:
            return StopResult("")
        held = self._held + text
        for position, letter in enumerate(text, start=len(self._held) + 1):
            found = self._advance(letter)
            if found is not None:
                self._held, self._stopped = "", True
                return StopResult(held[: position if self._include else position - len(found)], found)
        cut = len(held) - max((pattern.matched for pattern in self._patterns), default=0)
        self._held = held[cut:]
        return StopResult(held[:cut])

    def flush(self) -> StopResult:
        """Ends the text: what was held back is let out, it is no stop string any more."""
        held, self._held = self._held, ""
        return StopResult(held)

    def _advance(self, letter: str) -> str | None:
        found: str | None = None
        for pattern in self._patterns:  # the longest first: it began first
            if pattern.advance(letter) and found is None:
                found = pattern.stop
        return found


class _Pattern:
    """How much of one stop string the text so far ends with."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def advance(self, letter: str) -> bool:
        matched = self.matched
        while matched and self.stop[matched] != letter:
            matched = self._borders[matched - 1]
        self.matched = matched + (self.stop[matched] == letter)
        return self.matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its end."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = borders[length - 1]
        length += text[length] == text[position]
        borders[position] = length
    return borders
