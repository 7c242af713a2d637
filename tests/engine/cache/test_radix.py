"""The tree of keys against searches that look at every node, with hashes that collide (S28) as well."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.radix import ID_BYTES, KEY_BYTES, Namespace, Node, RadixTree, common_tokens, key_of
from engine.runtime.batch import PAGE_TOKENS
from tests.engine.cache.weak_keys import WeakKey


def page(chance: random.Random, ids: int = PAGE_TOKENS) -> list[int]:
    """Alike at the start more often than not."""
    same = chance.randint(0, ids)
    return [*([7] * same), *(chance.randint(0, 3) for _ in range(ids - same))]


@given(st.lists(st.integers(0, 1 << 30), max_size=40), st.lists(st.integers(0, 1 << 30), max_size=40), st.integers(0, 40))
def test_common_tokens_counts_whole_ids(one: list[int], other: list[int], same: int) -> None:
    other = [*one[:same], *other]
    naive = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert common_tokens(key_of(one), key_of(other)) == naive


def test_ids_that_share_bytes_are_not_equal() -> None:
    assert common_tokens(key_of([0x01020304]), key_of([0x7F020304])) == 0
    assert len(key_of([1])) == ID_BYTES and len(key_of(range(PAGE_TOKENS))) == KEY_BYTES


@pytest.mark.parametrize("weak", [False, True], ids=["hash", "4-bit hash"])
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_the_path_of_a_prompt_is_the_longest_run_of_equal_pages(weak: bool, seed: int) -> None:
    chance = random.Random(seed)
    make = (lambda tokens: WeakKey(key_of(tokens))) if weak else key_of
    tree, known = RadixTree(1), set[tuple[str, tuple[int, ...]]]()
    for _ in range(30):
        salt, tokens = chance.choice("ab"), list(itertools.chain(*(page(chance) for _ in range(3))))
        node = tree.root(Namespace(salt=salt))
        for start in range(0, len(tokens), PAGE_TOKENS):
            key = make(tokens[start : start + PAGE_TOKENS])
            node = node.children.get(key) or tree.add(node, key)
            known.add((salt, tuple(tokens[: start + PAGE_TOKENS])))
    for _ in range(30):
        salt, tokens = chance.choice("abc"), list(itertools.chain(*(page(chance) for _ in range(4))))
        if chance.random() < 0.6:
            salt, begun = chance.choice(sorted(known))
            tokens = [*begun, *page(chance)]
        limit = chance.randint(0, len(tokens))
        path = tree.path(Namespace(salt=salt), make(tokens), limit)
        longest = max(n for n in range(limit // PAGE_TOKENS + 1) if not n or (salt, tuple(tokens[: n * PAGE_TOKENS])) in known)
        assert max(0, len(path) - 1) == longest
        assert b"".join(node.key for node in path) == key_of(tokens[: longest * PAGE_TOKENS])


def _family(chance: random.Random) -> tuple[RadixTree, Node]:
    tree = RadixTree(1)
    root = tree.root(Namespace())
    for _ in range(chance.randint(0, 40)):
        key = key_of(page(chance, chance.choice([PAGE_TOKENS, *range(1, PAGE_TOKENS)])))
        if key not in root.children and key not in root.tails:
            tree.add(root, key)
    return tree, root


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_neighbours_in_order_are_those_that_begin_most_alike(seed: int) -> None:
    chance = random.Random(seed)
    _, root = _family(chance)
    rest = key_of(page(chance, chance.randint(1, PAGE_TOKENS)))
    everyone = [*root.children.values(), *root.tails.values()]
    most = max((common_tokens(node.key, rest) for node in everyone), default=0)
    assert max((common_tokens(node.key, rest) for node in root.alike(rest)), default=0) == most
    assert root.starting_with(rest) == any(node.key.startswith(rest) for node in everyone)
    naive = {key for key in root.tails if rest.startswith(key)}
    assert {node.key for node in root.tails_within(rest)} == naive


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_is_cut_leaves_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    tree, root = _family(chance)
    nodes = list(tree.nodes())
    chance.shuffle(nodes)
    for count, node in enumerate(nodes, 1):
        tree.cut(node)
        assert not node.alive and len(list(tree.nodes())) == len(nodes) - count == len(root.order)
        assert root.order == sorted([*root.children, *root.tails])
    tree.vacate(root)
    tree.forget_empty()
    assert tree.path(Namespace(), b"", 0) == [] and tree.root(Namespace()) is not root


def test_a_root_that_is_in_use_again_is_not_forgotten() -> None:
    tree = RadixTree(1)
    root = tree.root(Namespace())
    tree.vacate(root)
    tree.add(root, key_of([1]))
    tree.forget_empty()
    assert tree.root(Namespace()) is root


def test_only_leaves_can_be_cut_and_a_page_is_there_once() -> None:
    tree = RadixTree(1)
    parent = tree.add(tree.root(Namespace()), key_of(range(PAGE_TOKENS)))
    child = tree.add(parent, key_of(range(3)))
    for misuse in (lambda: tree.cut(parent), lambda: tree.add(parent, key_of(range(3)))):
        with pytest.raises(AssertionError):
            misuse()
    assert list(tree.nodes()) == [child, parent], "each after all that is below it"
