"""Philox4x32-10: random numbers as a function of (seed, choice, position, purpose), with no state to keep or to lose.

Owned here: the block function and which word means what. The same draw has the same number whatever ran before it, so a batch,
a preemption or a restart cannot change it. Plain integers: other backends reproduce these bits.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from enum import IntEnum

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

Words = tuple[int, int, int, int]


class Draw(IntEnum):
    """What a number decides. Values are part of the format: a seed's meaning depends on them."""

    SAMPLE = 0  # the token at a position


def philox4x32(counter: Words, key: tuple[int, int], rounds: int = 10) -> Words:
    """Four random words for a counter of four words and a key of two, each of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, draw: Draw = Draw.SAMPLE, node: int = 0) -> float:
    """A float64 in [0, 1): the top 53 bits of the first two words.

    The key is the 64 bits of `seed`, low word first; the counter is (position, draw, node, choice), so no two choices of a seed
    can ever meet. `position` is the index in the whole sequence of the token being drawn.
    """
    first, second, _, _ = philox4x32((position, draw, node, choice), (seed & _WORD, seed >> 32 & _WORD))
    return ((first << 32 | second) >> 11) * 2.0**-53
