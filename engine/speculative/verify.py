"""Verifying a draft tree: which of its nodes the model would have said itself.

The model draws after the last plain token, by the same rule and the same random number as without a draft. If what it draws is a
child there, the draft was right and the next draw is the one after that node, and so on; the last draw is a token that nobody had
drafted. So the tokens are those of plain decoding, one by one, whatever was drafted; and for a draft that is certain of its
tokens this accepts as often as any exact rule can: with the probability that the model gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

ROOT = -1


def walk(
    parents: Sequence[int], tokens: Sequence[int], draw: Callable[[int], _T | None], token_of: Callable[[_T], int]
) -> tuple[list[_T], list[int]]:
    """The draws, and the nodes that were right; one draw more than nodes, unless a draw failed (None).

    `draw(node)` draws the token that follows `node` (ROOT: the last plain token), once its path is known to be right.
    """
    drawn: list[_T] = []
    path: list[int] = []
    node = ROOT
    while (found := draw(node)) is not None:
        drawn.append(found)
        token = token_of(found)
        child = next((i for i in range(node + 1, len(parents)) if parents[i] == node and tokens[i] == token), None)
        if child is None:
            break
        path.append(child)
        node = child
    return drawn, path
