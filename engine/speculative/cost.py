"""What rows cost: how much longer a step takes with more tokens in it, measured while the engine runs.

A step over n tokens is taken to last first * (1 + slope * (n - 1)), unless its own size was measured. Of each number of tokens the
recent times are kept; only steps without prompt tokens count. Times depend on how long the contexts are too, so only ratios of
recent ones are used.
Invariant: a ratio is at least 1 and grows with the rows added.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_RECENT = 15  # steps of one size that are kept
_LEAST = 3  # fewer say nothing
_MOST_TOKENS = 256  # larger steps are told from the slope
_PRIOR_SLOPE = 0.15  # before anything is measured: a row more costs so much of a step of one


class StepCosts:
    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._slope = _PRIOR_SLOPE

    def observe(self, tokens: int, ms: float) -> None:
        """A step over `tokens` tokens of answers, and none of prompts, took `ms`."""
        if not 0 < tokens <= _MOST_TOKENS:
            return
        self._times.setdefault(tokens, deque(maxlen=_RECENT)).append(ms)
        self._slope = self._measured_slope()

    def ratio(self, tokens: int, more: int) -> float:
        """How many times as long a step over `tokens + more` tokens takes as one over `tokens`."""
        if more <= 0:
            return 1.0
        plain, larger = self._measured(tokens), self._measured(tokens + more)
        if plain is not None and larger is not None:
            return max(1.0, larger / plain)
        return (1 + self._slope * (tokens + more - 1)) / (1 + self._slope * (tokens - 1))

    def _measured(self, tokens: int) -> float | None:
        times = self._times.get(tokens)
        return median(times) if times and len(times) >= _LEAST else None

    def _measured_slope(self) -> float:
        """From the smallest and the largest step that are known; the prior until there are two."""
        known = sorted((tokens, time) for tokens in self._times if (time := self._measured(tokens)) is not None)
        if len(known) < 2:
            return self._slope
        (small, least), (large, most) = known[0], known[-1]
        # least = first * (1 + s * (small - 1)), most = first * (1 + s * (large - 1))
        below = least * (large - 1) - most * (small - 1)
        slope = (most - least) / below if below > 0 else 1.0
        return min(1.0, max(0.0, slope))
