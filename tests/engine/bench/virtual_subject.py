"""A subject without a model, on a clock of its own: a step takes STEP_MS, and TOKEN_MS for each of its tokens, always."""

from __future__ import annotations

from engine.bench.hash_executor import HashExecutor, VirtualClock
from engine.bench.subject import Subject
from tests.fixtures.scripted_executor import layout_of

STEP_MS, TOKEN_MS = 10.0, 0.25


def virtual_subject(*, context_tokens: int = 8192, pages: int = 800) -> Subject:
    clock = VirtualClock()
    executor = HashExecutor(clock, step_ms=STEP_MS, token_ms=TOKEN_MS, vocab_size=1000)
    return Subject(executor, layout_of(None), (pages,), context_tokens=context_tokens, vocab_size=1000, clock=clock)


def said(text: str) -> None:
    """Progress that nobody reads."""
