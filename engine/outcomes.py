"""What the rows of a step mean for their sequences: the tokens taken, whose fault a failure is, and how to find that out.

Functions only, on what the step loop (engine.py) has in hand. Invariant: a sequence takes no token behind its end.
"""

from __future__ import annotations

from engine.errors import CavectlError, ErrorInfo
from engine.scheduler.plan import PlannedRow
from engine.scheduler.sequence import Sequence
from engine.types import FinishReason, TokenOutput


def take(sequence: Sequence, tokens: list[TokenOutput]) -> tuple[list[TokenOutput], FinishReason | None]:
    """Those of `tokens` that the sequence takes, which are its own from now on, and why it ends with the last."""
    taken: list[TokenOutput] = []
    for token in tokens:
        stopped = token.id in sequence.stop_ids and sequence.output_tokens >= sequence.request.min_tokens
        sequence.tokens.append(token.id)
        taken.append(token)
        if stopped:
            return taken, "stop"
        if sequence.output_tokens >= sequence.limit:
            return taken, "length"
    return taken, None


def halves(rows: list[PlannedRow]) -> list[list[PlannedRow]]:
    """Both halves of `rows` that are not empty."""
    middle = (len(rows) + 1) // 2
    return [piece for piece in (rows[:middle], rows[middle:]) if piece]


def blame(error: Exception) -> ErrorInfo:
    """The error as its request may see it: what was meant for a person word for word, anything else without its inside."""
    if isinstance(error, CavectlError):
        return error.info
    if isinstance(error, MemoryError):
        return ErrorInfo("out_of_memory", "there was not enough memory for this request")
    return ErrorInfo("engine_error", "the engine failed on this request")
