"""The verifier against given probability tables: what it says has the target's distribution, whatever was drafted. Row B42.

Eight tokens, temperature 0.7, top-k 3, drafts unlike the target, as chains and as trees: 50,000 draws a seed and
the joint distribution of the first three tokens. That the test can tell is shown by verifiers that are wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from engine.runtime.philox import uniform
from engine.speculative.tree import DraftTree
from engine.speculative.verify import ROOT, walk

VOCAB, TEMPERATURE, TOP_K, DRAWS, FIRST = 8, 0.7, 3, 50_000, 3
LEAST_EXPECTED = 5

Draw = Callable[[int], int | None]
Verifier = Callable[[Sequence[int], Sequence[int], Draw], list[int]]


@cache
def target() -> list[list[float]]:
    """Of each last token, the probabilities of the next, filtered as the sampler does."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    best = logits.topk(TOP_K, dim=-1)
    kept = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
    return (kept / TEMPERATURE).softmax(-1).tolist()


@cache
def drafter() -> list[list[float]]:
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return logits.softmax(-1).tolist()


def pick(probabilities: Sequence[float], number: float) -> int:
    total = 0.0
    for token, probability in enumerate(probabilities):
        total += probability
        if number < total:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


def chain(chance: random.Random, last: int) -> DraftTree:
    tokens: list[int] = []
    for _ in range(FIRST):
        last = pick(drafter()[last], chance.random())
        tokens.append(last)
    return DraftTree(tokens, list(range(-1, FIRST - 1)), [1] * FIRST)


def tree(chance: random.Random, last: int) -> DraftTree:
    """Two or three different tokens after each node, likely ones of the drafter among them."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [(ROOT, last)]
    for _ in range(2):
        below: list[tuple[int, int]] = []
        for node, token in level:
            children = {pick(drafter()[token], chance.random()) for _ in range(3)}
            for child in sorted(children, key=lambda _: chance.random()):
                tokens.append(child)
                parents.append(node)
                below.append((len(tokens) - 1, child))
        level = below
    return DraftTree(tokens, parents, [1] * len(tokens))


def ours(parents: Sequence[int], tokens: Sequence[int], draw: Draw) -> list[int]:
    return walk(parents, tokens, draw, lambda token: token)[0]


def said(seed: int, draft: Callable[[random.Random, int], DraftTree], verify: Verifier) -> Counter[tuple[int, ...]]:
    """The first three tokens of so many texts that begin with token 0. Each has random numbers of its own, by position."""
    chance, counts = random.Random(seed), Counter[tuple[int, ...]]()
    for choice in range(DRAWS):
        text = [0]
        while len(text) <= FIRST:
            proposed = draft(chance, text[-1])

            def draw(node: int, text: list[int] = text, proposed: DraftTree = proposed, choice: int = choice) -> int:
                path: list[int] = []
                while node != ROOT:
                    path.append(proposed.tokens[node])
                    node = proposed.parents[node]
                whole = [*text, *reversed(path)]
                return pick(target()[whole[-1]], uniform(seed, choice, len(whole)))

            text += verify(proposed.parents, proposed.tokens, draw)
        counts[tuple(text[1 : FIRST + 1])] += 1
    return counts


def p_value(counts: Counter[tuple[int, ...]]) -> float:
    """Of chi-square against the target's joint distribution; cells of fewer than five expected are one."""
    statistic, rest_seen, rest_expected, cells = 0.0, 0.0, 0.0, 0
    for a in range(VOCAB):
        for b in range(VOCAB):
            for c in range(VOCAB):
                expected = DRAWS * target()[0][a] * target()[a][b] * target()[b][c]
                seen = counts[a, b, c]
                if expected < LEAST_EXPECTED:
                    rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
                    continue
                statistic += (seen - expected) ** 2 / expected
                cells += 1
    if rest_expected:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    freedom = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


DRAFTS = [chain, tree]


@pytest.mark.parametrize("draft", DRAFTS, ids=["chain", "tree"])
def test_what_is_said_has_the_targets_distribution(draft: Callable[[random.Random, int], DraftTree]) -> None:
    assert p_value(said(0, draft, ours)) > 1e-4


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("draft", DRAFTS, ids=["chain", "tree"])
def test_ten_seeds_are_as_even_as_chance(draft: Callable[[random.Random, int], DraftTree]) -> None:
    """All above 1e-4, and together uniform by Kolmogorov-Smirnov at 0.001, whose bound for ten is 0.58."""
    values = sorted(p_value(said(seed, draft, ours)) for seed in range(10))
    assert values[0] > 1e-4
    assert max(max((i + 1) / 10 - value, value - i / 10) for i, value in enumerate(values)) < 0.58


# --- verifiers that are wrong -----------------------------------------------------------------------------------------------------


def trusting(parents: Sequence[int], tokens: Sequence[int], draw: Draw) -> list[int]:
    """Takes the first draft without asking."""
    first = next(i for i, parent in enumerate(parents) if parent == ROOT)
    return [tokens[first]]


def persistent(parents: Sequence[int], tokens: Sequence[int], draw: Draw) -> list[int]:
    """What was drawn and not drafted is replaced by a draft half of the time."""
    drawn, path = walk(parents, tokens, draw, lambda token: token)
    if not path and sum(tokens) % 2:
        return [tokens[0]]
    return drawn


def misplaced(parents: Sequence[int], tokens: Sequence[int], draw: Draw) -> list[int]:
    """Scores every draft as if it stood at the end of the text: the filters and numbers of another place."""
    drawn = [draw(ROOT)]
    node = next((i for i, parent in enumerate(parents) if parent == ROOT and tokens[i] == drawn[0]), None)
    return [token for token in [*drawn, *([] if node is None else [draw(ROOT)])] if token is not None]


@pytest.mark.parametrize("draft", DRAFTS, ids=["chain", "tree"])
@pytest.mark.parametrize("wrong", [trusting, persistent, misplaced])
def test_wrong_verifiers_are_found(wrong: Verifier, draft: Callable[[random.Random, int], DraftTree]) -> None:
    assert p_value(said(0, draft, wrong)) < 1e-6
