"""Random lives over keys whose hashes collide nearly always: still nobody reads another's page, and nothing is missed (S28)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.cache.radix import Namespace
from tests.engine.cache.cache_run import CacheRun
from tests.engine.cache.cache_scenes import B, cached
from tests.engine.cache.test_cache import LAYOUTS, Life
from tests.engine.cache.weak_keys import WeakKey, weaken
from tests.fixtures.scripted_executor import Kind


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lives_with_hashes_of_four_bits_are_as_right_as_others(layout: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weaken(monkeypatch)
    seen: Counter[str] = Counter()
    for seed in range(8):
        life = Life(layout, 6 + seed, True, random.Random(seed))
        life.live()
        seen += life.seen
        assert all(isinstance(node.key, WeakKey) for node in life.cache._tree.nodes()), "a key with a strong hash"
    assert seen["open"] > 80 and seen["hit"] > 20, seen


def test_lives_are_the_same_whatever_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def hits() -> list[tuple[int, int]]:
        life = Life((None, 20), 12, True, random.Random(7))
        life.live()
        return [(life.cache.probe(namespace, tokens), life.cache.evicted_pages) for namespace, tokens in life.histories]

    strong = hits()
    weaken(monkeypatch)
    assert hits() == strong and any(hit for hit, _ in strong)


def test_pages_whose_hashes_are_equal_are_told_apart_side_by_side_and_one_below_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permutations of one page have one hash here: forty are siblings, and ten stand in one path."""
    weaken(monkeypatch)
    run = CacheRun((None,), [200])
    turned = [[*range(1, B)][at:] + [*range(1, B)][:at] for at in range(B - 1)]
    pages = [[100, *turn] for turn in turned] + [[*turn, 100] for turn in turned]
    assert len({hash(WeakKey(bytes(page))) for page in pages}) == 1
    for page in pages:
        run.through(page)
    deep = [token for page in pages[:10] for token in page]
    run.through(deep)
    assert run.cache.cached_pages == len(pages) + 9
    for page in pages:
        assert cached(run, page) == B
        assert run.cache.probe(Namespace(salt="a"), page) == 0
    assert cached(run, deep) == 10 * B
    assert cached(run, deep[B:]) == B, "what is below another page is no prefix"
