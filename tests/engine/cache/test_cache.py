"""Random lives of leases over eight layouts: every page that is read is checked, every account balanced after each operation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.lease import Lease
from engine.cache.radix import Namespace
from engine.runtime.batch import PAGE_TOKENS
from tests.engine.cache.cache_run import CacheRun
from tests.fixtures.scripted_executor import Kind

LAYOUTS: list[tuple[Kind, ...]] = [
    (None,),
    (None, 20),
    (20,),
    (1,),
    ("state",),
    ("latent", None),
    (None, "state"),
    (40, "state"),
]
NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(adapter="b")]
OPERATIONS = 150


class Life:
    """Operations by weight: mostly leases that come, grow and go, and now and then something that shakes the whole cache."""

    def __init__(self, layout: tuple[Kind, ...], pages: int, sharing: bool, chance: random.Random, *, pins: bool = True) -> None:
        self.run = CacheRun(layout, [pages + 2 * (kind == "state") for kind in layout], sharing=sharing)
        self.cache, self.chance, self.pins = self.run.cache, chance, pins
        self.histories: list[tuple[Namespace, tuple[int, ...]]] = []
        self.seen: Counter[str] = Counter()
        self.operations: list[Callable[[], object]] = [self.open, self.feed, self.retry, self.close, self.discard, self.wait]
        self.operations += [self.expire, self.grow, self.clear, self.fork]
        self.weights = [25, 45, 6, 12, 3, 6, 1, 1, 0.5, 8]

    def live(self) -> None:
        for operation in self.chance.choices(self.operations, self.weights, k=OPERATIONS):
            self.run.now += self.chance.uniform(0, 2)
            operation()
            self.balance()

    def open(self) -> None:
        """A prompt of few kinds, so that many begin alike; or what somebody wrote, and more."""
        self._open(*self._prompt())

    def fork(self) -> None:
        """Another sequence that begins like one that runs, to some token or to the last."""
        if self.run.leases:
            parent = self._some()
            same = self.chance.choice([len(parent.tokens), self.chance.randint(1, len(parent.tokens))])
            self._open(parent.namespace, [*parent.tokens[:same], self.chance.randint(0, 9)])

    def _open(self, namespace: Namespace, tokens: list[int]) -> None:
        pin = self.chance.choice([None, None, None, True, False]) if self.pins else None
        if pin and not self.cache.can_pin(len(tokens), 40, self._promised()):
            pin = None
        fits = [spare for spare in range(14) if self.cache.can_start(namespace, tokens, spare)]
        if not fits:
            return
        probed = self.cache.probe(namespace, tokens)
        lease = self.run.open(tokens, namespace=namespace, retention=self.chance.choice(["rest", "chat"]), pin=pin)
        self.seen["open"] += 1
        self.seen["hit"] += lease.hit > 0
        self.seen["copied"] += any(kind != "state" for kind in self.run.kinds) and lease.hit % PAGE_TOKENS > 0
        assert lease.hit <= probed <= len(tokens) - 1
        assert probed <= self._longest(namespace, tokens), "more than there is"
        if pin is not False and self.run.sharing and set(self.run.kinds) <= {None, "latent"}:
            assert probed == self._longest(namespace, tokens), "not the longest prefix that is there"
            assert lease.hit >= probed // PAGE_TOKENS * PAGE_TOKENS
            left = (self.cache.room(lease) - -(-len(tokens) // PAGE_TOKENS) * PAGE_TOKENS) // PAGE_TOKENS
            assert left >= max(fits), "less is at hand than was promised"

    def feed(self) -> None:
        if self.run.leases:
            lease = self._some()
            self.seen["fed"] += self.run.feed(lease, self.chance.randint(1, 40)) > 0
            if lease.computed == len(lease.tokens):
                lease.tokens.extend(len(lease.tokens) % 5 for _ in range(self.chance.randint(0, 3)))

    def retry(self) -> None:
        """A step that was submitted and brought nothing; the executor has put its state back."""
        if not self.run.leases:
            return
        lease, before = self._some(), dict(self.run.memory)
        self.run.feed(lease, self.chance.randint(1, 40), confirm=False)
        for group, kind in enumerate(self.run.kinds):
            if kind == "state" and lease.computed > lease.hit:
                key = (group, lease.pages[group][0], 0)
                self.run.memory[key] = before[key]
        self.run.check()

    def close(self) -> None:
        if self.run.leases:
            lease = self._some()
            self.histories = [*self.histories[-20:], (lease.namespace, tuple(lease.tokens))]
            self.run.close(lease, settled=self.chance.random() < 0.7)

    def discard(self) -> None:
        if self.run.leases:
            self.run.discard(self._some())

    def wait(self) -> None:
        self.run.now += self.chance.uniform(0, 100)
        self.expire()

    def expire(self) -> None:
        due = self.cache.expire(self.run.now)
        assert due is None or due > self.run.now
        self.run.check()
        self.run.now += self.chance.choice([0, 0, 301, 1900]) * (self.chance.random() < 0.1)

    def grow(self) -> None:
        if self.cache.total_pages < 40:
            self.cache.grow([group.total + self.chance.randint(0, 2) for group in self.cache.groups])
            self.run.check()

    def clear(self) -> None:
        self.cache.clear()
        self.run.check()
        assert self.run.leases or self.cache.cached_pages + self.cache.pinned_pages == 0

    def balance(self) -> None:
        cache = self.cache
        free = sum(group.free for group in cache.groups)
        assert free + cache.used_pages + cache.cached_pages + cache.pinned_pages == cache.total_pages
        assert [len(held) for held in cache.held()] == [group.total - group.free for group in cache.groups]
        filled, slots = cache.filled()
        assert 0 <= filled <= slots
        if not self.run.sharing:
            assert cache.cached_pages == cache.pinned_pages == 0

    def _prompt(self) -> tuple[Namespace, list[int]]:
        chance = self.chance
        more = [chance.randint(0, 9) for _ in range(chance.randint(1, 20))]
        if self.histories and chance.random() < 0.6:
            namespace, history = chance.choice(self.histories)
            return namespace, [*history[: chance.randint(1, len(history))], *more]
        return chance.choice(NAMESPACES), [*(t // 9 for t in range(chance.randint(0, 60))), *more]

    def _longest(self, namespace: Namespace, tokens: list[int]) -> int:
        """By looking at every page: what a slot holds is known to the memory, whether it counts to the pages' holders."""
        if not self.run.sharing:
            return 0
        held = [set(pages) for pages in self.cache.held()]
        present = {
            (group, written[1])
            for (group, page, _), written in self.run.memory.items()
            if page in held[group] and written[0] == namespace and self._computed(group, page, written[1])
        }
        lengths = range(len(tokens) - 1, 0, -1)
        return next((n for n in lengths if all((g, tuple(tokens[:end])) in present for g, end in self._wanted(n))), 0)

    def _wanted(self, length: int) -> Iterator[tuple[int, int]]:
        """(group, tokens up to and with the one that a slot must hold) of all that a query after `length` tokens looks at."""
        for group, kind in enumerate(self.run.kinds):
            first = length if kind == "state" else max(0, length - kind + 1) + 1 if isinstance(kind, int) else 1
            yield from ((group, end) for end in range(first, length + 1))

    def _computed(self, group: int, page: int, written: tuple[int, ...]) -> bool:
        """Whether the cache knows of it: a step that failed has written, too, and a page keeps what it held when it is free."""
        if self.run.kinds[group] == "state":
            return any(node.pages[group] == page and node.end == len(written) for node in self.cache._tree.nodes())
        number = (len(written) - 1) // PAGE_TOKENS
        for lease in self.run.leases:
            if number < len(lease.pages[group]) and lease.pages[group][number] == page and not lease.copies:
                return tuple(lease.tokens[: len(written)]) == written and len(written) <= lease.computed
        return any(
            node.pages[group] == page and node.end >= len(written) and node.depth == number + 1 for node in self.cache._tree.nodes()
        )

    def _promised(self) -> int:
        return sum(-(-lease.pin_tokens // PAGE_TOKENS) for lease in self.run.leases)

    def _some(self) -> Lease:
        return self.chance.choice(self.run.leases)


@settings(deadline=None, max_examples=200)
@given(
    layout=st.sampled_from(LAYOUTS),
    pages=st.integers(4, 14),
    sharing=st.sampled_from([True, True, True, True, False]),
    seed=st.integers(0, 1 << 32),
)
def test_every_page_that_is_read_is_the_right_one_and_every_account_balances(
    layout: tuple[Kind, ...], pages: int, sharing: bool, seed: int
) -> None:
    Life(layout, pages, sharing, random.Random(seed)).live()


@settings(deadline=None, max_examples=100)
@given(layout=st.sampled_from(LAYOUTS), pages=st.integers(4, 14), spare=st.integers(0, 4), seed=st.integers(0, 1 << 32))
def test_what_can_start_can_finish_and_leaves_what_is_to_spare(layout: tuple[Kind, ...], pages: int, spare: int, seed: int) -> None:
    """Fed token by token; without a window also when all its pages are taken at once."""
    life = Life(layout, pages, True, random.Random(seed), pins=False)
    life.live()
    run, cache = life.run, life.cache
    for _ in range(20):
        namespace, tokens = life._prompt()
        if not cache.can_start(namespace, tokens, spare):
            continue
        lease = run.open(tokens, namespace=namespace)
        if not any(isinstance(kind, int) for kind in layout):
            assert cache.room(lease) >= len(tokens)
            cache.extend(lease, len(tokens))
        while lease.computed < len(tokens):
            assert run.feed(lease, 1), "what could start is stuck"
            assert all(group.at_hand >= spare for group in cache.groups if group.grows), "less is at hand than was promised"
        run.close(lease)


def test_the_lives_above_are_full_of_incident() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        life = Life(LAYOUTS[seed % 2], 10, True, random.Random(seed))
        life.live()
        seen += life.seen
        seen["evicted"] += life.cache.evicted_pages
    assert seen["open"] > 200 and seen["hit"] > 80 and seen["copied"] > 50 and seen["fed"] > 500 and seen["evicted"] > 100, seen
