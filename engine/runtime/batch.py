"""One engine step as plain data: what the scheduler hands an executor, and what comes back. No tensors, so it can cross a process.

There is no prefill or decode phase. A row is "n new tokens of a sequence", starting at `position`; a prompt chunk, a decode, a
prefix hit's remainder and a draft tree are all this one thing. After a tree the draws go on along it as long as what is drawn is a
draft there (engine/speculative/verify.py); the keys and values of the drafts that were right then lie at their positions.
Pages hold PAGE_TOKENS tokens; logical token t of a sequence lives in slot t % PAGE_TOKENS of pages[group][t // PAGE_TOKENS]. A page
of a state group is one sequence's whole recurrent state instead: pages[group] is that one number. It holds the state after
`position` tokens (anything at position 0, where a state is zero by definition), and after the step the state after the row's last
token; a step that fails has changed no state.
"""

from __future__ import annotations

import msgspec

from engine.types import SamplingParams, TokenOutput

PAGE_TOKENS = 16
FROM_PREVIOUS = -1  # as a row's only token: the token sampled for this sequence by the step before
NO_PAGE = -1  # in a window group: a page that fell out of the window and was given back


class SamplingSlot(msgspec.Struct, frozen=True, kw_only=True):
    """State that an executor keeps for one sampled sequence from the step that opens the slot to the one that closes it.

    After a preemption or a failed step a slot is opened again with the output so far: opening an open slot replaces its state,
    closing a closed one does nothing. The executor appends each token it samples.
    """

    slot: int
    params: SamplingParams
    choice: int  # Philox key is (params.seed, choice)
    prompt: list[int]
    output: list[int] = []
    stop_ids: list[int] = []  # masked while len(output) < min_tokens
    min_tokens: int = 0
    logprobs: int | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence: int  # stable while the sequence lives
    tokens: list[int]
    position: int  # logical position of tokens[0]; cache holds positions 0..position-1
    pages: list[list[int]]  # per cache group, covering at least position + len(tokens) tokens; of a state group: one number
    sampling: int = -1  # sampling slot: draw one token after the last of `tokens`; -1: do not sample
    adapter: int = 0
    mask: bytes | None = None  # grammar bitset over the vocabulary, bit set = allowed
    tree: list[int] | None = None  # the last len(tree) tokens are drafts: each one's parent among them, -1 = the last plain token


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    rows: list[Row]
    opened: list[SamplingSlot] = []
    closed: list[int] = []  # before `opened`: a slot in both is the new one
    # (group, source page, target page), done before the step: copy on write, and snapshots of state. No page is both.
    copies: list[tuple[int, int, int]] = []


class RowOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    tokens: list[TokenOutput] = []  # empty when the row was not sampled; one more than drafts that were right
    error: str = ""  # this row alone failed (NaN logits); others are fine


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    rows: list[RowOutput]  # one for each row of the inputs, same order
