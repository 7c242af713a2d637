"""Philox4x32-10 against the published vectors and against a second implementation over arrays."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runtime.philox import Draw, philox4x32, uniform

# Random123 1.14, kat_vectors: counter, key -> output.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    assert philox4x32(_words(counter), _words(key)) == _words(expected)  # type: ignore[arg-type]


def _philox_arrays(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[n, 4] and [n, 2] uint64 holding 32-bit words -> [n, 4]: the same function, a column at a time."""
    mask = np.uint64(0xFFFFFFFF)
    c, k = [counters[:, i] for i in range(4)], [keys[:, i] for i in range(2)]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & mask, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(c, axis=1)


def test_random_blocks_equal_the_array_version() -> None:
    rng = np.random.default_rng(5)
    counters = rng.integers(0, 2**32, (500, 4), dtype=np.uint64)
    keys = rng.integers(0, 2**32, (500, 2), dtype=np.uint64)
    expected = _philox_arrays(counters, keys).tolist()
    got = [list(philox4x32(tuple(c), tuple(k))) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert got == expected


def test_uniform_uses_every_part_of_its_address() -> None:
    base = uniform(seed=7, choice=0, position=3)
    others = {
        uniform(8, 0, 3),
        uniform(7 | 1 << 63, 0, 3),  # the seed's high word counts
        uniform(7, 1, 3),
        uniform(7, 0, 4),
        uniform(7, 0, 3, Draw.SAMPLE, 1),
    }
    assert len(others | {base}) == 6
    assert uniform(7, 0, 3) == base


def test_uniform_is_the_top_53_bits() -> None:
    first, second, _, _ = philox4x32((3, 0, 0, 2), (9, 1))
    assert uniform(seed=9 + 2**32, choice=2, position=3) == ((first * 2**32 + second) // 2**11) / 2**53


def test_uniform_is_uniform() -> None:
    draws = np.array([uniform(1, 0, i) for i in range(20_000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 94  # chi-square with 49 degrees of freedom, p = 0.0001
