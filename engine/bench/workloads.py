"""What the benchmarks ask a model: token ids and lengths, the same for the same seed on every machine.

Token ids are uniform over the vocabulary: a dense model takes the same time for any, and no two prompts share a prefix by chance.
Lengths of a mix are drawn from a gamma distribution of shape 4 (standard deviation half the mean, long to the right as real
lengths are), rounded, at least 1. Not here: when a request comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

GAMMA_SHAPE = 4.0
DISTRIBUTION = "gamma, shape 4: standard deviation 0.5 of the mean"


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of traffic: mean tokens in and out."""

    name: str
    prompt_tokens: int
    output_tokens: int


MIXES = (Mix("service dialogue", 217, 89), Mix("tickets", 482, 156), Mix("contract review", 3210, 412))


def generator(*names: object) -> Random:
    """A source of numbers of its own for each combination of names; the run's seed is one of them."""
    return Random("/".join(str(name) for name in names))  # noqa: S311  not for secrets


def prompt(count: int, vocab_size: int, *names: object) -> list[int]:
    """`count` token ids below `vocab_size`, others for other `names`."""
    source = generator("prompt", *names)
    return [source.randrange(vocab_size) for _ in range(count)]


def lengths(mix: Mix, count: int, *names: object) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of `count` requests of `mix`."""
    source = generator("lengths", mix.name, *names)
    return [(_length(source, mix.prompt_tokens), _length(source, mix.output_tokens)) for _ in range(count)]


def _length(source: Random, mean: int) -> int:
    return max(1, round(source.gammavariate(GAMMA_SHAPE, mean / GAMMA_SHAPE)))
