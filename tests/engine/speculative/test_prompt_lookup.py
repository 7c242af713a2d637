"""Prompt lookup: against a search over the whole text, on texts of few tokens where everything repeats, and what it costs."""

from __future__ import annotations

import random
import time

import pytest

from engine.speculative.prompt_lookup import LEAST_MATCH, PromptLookup
from engine.speculative.tree import DraftTree, Limits

MOST_MATCH = 32


def same(text: list[int], end: int) -> int:
    """How many tokens that end at `end` are those that the text ends with."""
    count = 0
    while count < MOST_MATCH and count <= end and text[end - count] == text[len(text) - 1 - count]:
        count += 1
    return count


def best_match(text: list[int]) -> int:
    return max((same(text, end) for end in range(len(text) - 1)), default=0)


def branch(tree: DraftTree) -> list[int]:
    """The first one: a node, its first child, and so on."""
    tokens, node = [], -1
    while (child := next((i for i in range(len(tree)) if tree.parents[i] == node), None)) is not None:
        tokens.append(tree.tokens[child])
        node = child
    return tokens


def proposed(text: list[int], limits: Limits) -> DraftTree:
    lookup = PromptLookup()
    try:
        return lookup.propose(0, text, limits)
    finally:
        lookup.close()


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 50])
def test_drafts_go_on_where_the_text_did(vocab: int) -> None:
    chance = random.Random(vocab)
    found = 0
    for _ in range(300):
        text = [chance.randrange(vocab) for _ in range(chance.randrange(60))]
        limits = Limits(chance.randrange(1, 20), chance.randrange(1, 9), chance.randrange(1, 5))
        tree = proposed(text, limits)
        assert len(tree) <= limits.nodes and max(tree.depths(), default=0) <= limits.depth
        assert sum(tree.parents.count(node) == 0 for node in range(len(tree))) <= limits.branches, "as many leaves as branches"
        edges = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(set(edges)) == len(edges), "two children of one node say the same"
        assert all(parent < node for node, parent in enumerate(tree.parents))
        if not len(tree):
            assert best_match(text) < LEAST_MATCH
            continue
        found += 1
        assert all(LEAST_MATCH <= match <= best_match(text) for match in tree.confidence)
        first, ends = branch(tree), range(len(text) - 1)
        assert any(same(text, end) == tree.confidence[0] and continues(text, end, first) for end in ends)
    assert found > 50 or vocab > 8


def continues(text: list[int], end: int, tokens: list[int]) -> bool:
    """Whether `tokens` follow `end`, the text going on with them where it ends."""
    return [*text, *tokens][end + 1 : end + 1 + len(tokens)] == tokens


def test_the_longest_match_of_a_text_that_says_it_once() -> None:
    passage = list(range(100, 140))
    text = [*passage, 1, 2, 3, *passage[:9]]
    tree = proposed(text, Limits(8, 8, 1))
    assert tree.tokens == passage[9:17] and tree.parents == list(range(-1, 7)) and set(tree.confidence) == {9}


def test_branches_share_what_they_have_in_common() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 9, 9, 1, 2]
    tree = proposed(text, Limits(16, 4, 2))
    assert tree.tokens == [3, 4, 6, 9, 5, 9] and tree.parents == [-1, 0, 1, 2, 1, 4]


def test_a_text_that_goes_round_goes_on() -> None:
    assert proposed([7, 8, 9, 7, 8, 9, 7], Limits(7, 7, 1)).tokens == [8, 9, 7, 8, 9, 7, 8]


def test_it_grows_token_by_token_as_it_would_at_once() -> None:
    chance = random.Random(3)
    text = [chance.randrange(4) for _ in range(2000)]
    lookup = PromptLookup()
    for length in range(1, len(text) + 1, 7):
        grown = lookup.propose(1, text[:length], Limits(6, 4, 2))
        if length % 49 == 1:
            assert grown == proposed(text[:length], Limits(6, 4, 2)), length
    lookup.forget(1)
    lookup.forget(1)
    lookup.close()


@pytest.mark.timing
@pytest.mark.parametrize("vocab", [2, 50, 30_000])
def test_it_costs_microseconds_however_long_the_text_is(vocab: int) -> None:
    """A hundred thousand tokens, then a token at a time: some microseconds each, most of it the call."""
    chance = random.Random(1)
    text = [chance.randrange(vocab) for _ in range(100_000)]
    lookup = PromptLookup()
    lookup.propose(0, text, Limits(16, 12, 3))
    started = time.perf_counter()
    for _ in range(300):
        text.append(chance.randrange(vocab))
        lookup.propose(0, text, Limits(16, 12, 3))
    lookup.close()
    assert (time.perf_counter() - started) / 300 < 200e-6
