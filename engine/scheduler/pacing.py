"""How many prompt tokens a step may take: so many that streams which run beside them still get a token in time.

The target is the time between two tokens of a stream. Steps are measured: a chunk that made its step too long is cut, one that left
time grows, by the ratio of the time there is for it to the time it took. A step without a decode has no stream to keep waiting; it
is bounded by PREFILL_STEP_MS, so that a request that comes, or goes, waits no longer than that for its turn.
Invariant: at least LEAST_TOKENS, so a prompt always moves on, and at most what the engine can take in a step.
"""

from __future__ import annotations

LEAST_TOKENS = 16
FIRST_TOKENS = 32  # beside decodes, before anything was measured
PREFILL_STEP_MS = 1000.0
AIM = 0.9  # of the target: half of the steps are longer than the middle one
MOST_CHANGE = 1.5
_MEMORY = 0.25  # weight of the newest measurement in a running mean


class Pacing:
    def __init__(self, *, target_ms: float, max_step_tokens: int) -> None:
        self._aim_ms = target_ms * AIM
        self._most = max_step_tokens
        self._chunk = float(min(FIRST_TOKENS, max_step_tokens))
        self._decode_ms: float | None = None  # a step of decodes alone
        self._token_ms: float | None = None  # a prompt token in a step of prompts alone

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of a step with decodes."""
        return int(self._chunk)

    def budget(self, decodes: int) -> int:
        """Prompt tokens that the next step may take beside so many decodes."""
        if decodes:
            return max(0, min(int(self._chunk), self._most - decodes))
        if not self._token_ms:
            return self._most
        return max(min(LEAST_TOKENS, self._most), min(self._most, int(PREFILL_STEP_MS / self._token_ms)))

    def observe(self, step_ms: float, decodes: int, prompt: int) -> None:
        """A step with so many decode and prompt tokens took `step_ms`."""
        if step_ms <= 0:  # a clock that cannot tell
            return
        if not prompt:
            self._decode_ms = _mean(self._decode_ms, step_ms) if decodes else self._decode_ms
        elif not decodes:
            self._token_ms = _mean(self._token_ms, step_ms / prompt)
        elif prompt >= self._chunk / 2 or step_ms > self._aim_ms:  # a small prompt in good time says nothing of the limit
            self._adapt(step_ms)

    def _adapt(self, step_ms: float) -> None:
        base = min(self._decode_ms or 0.0, step_ms * 0.9)  # a step cannot take less with a chunk than without
        ratio = max(0.0, self._aim_ms - base) / (step_ms - base)
        chunk = self._chunk * min(MOST_CHANGE, max(1 / MOST_CHANGE, ratio))
        self._chunk = max(min(LEAST_TOKENS, self._most), min(self._most, chunk))


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _MEMORY * (now - before)
