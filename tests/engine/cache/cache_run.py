"""Leases without a scheduler or a model: a memory that knows which tokens each page holds, and all that is read checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.lease import Lease
from engine.cache.manager import CacheManager
from engine.cache.radix import Namespace
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS
from engine.types import Retention
from tests.fixtures.scripted_executor import Kind, layout_of

Written = tuple[Namespace, tuple[int, ...]]  # what a slot holds: of which namespace, after which tokens


@dataclass
class CacheRun:
    """`memory[group, page, offset]` is what was last written there; of a state group, the whole state at offset 0."""

    kinds: tuple[Kind, ...]
    pages: list[int]
    sharing: bool = True
    now: float = 0.0
    memory: dict[tuple[int, int, int], Written] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = CacheManager(layout_of(*self.kinds), self.pages, sharing=self.sharing)

    def open(
        self,
        tokens: list[int],
        *,
        namespace: Namespace | None = None,
        retention: Retention = "rest",
        pin: bool | None = None,
        prompt_tokens: int | None = None,
    ) -> Lease:
        prompt = len(tokens) if prompt_tokens is None else prompt_tokens
        lease = self.cache.open(namespace or Namespace(), tokens, retention=retention, pin=pin, prompt_tokens=prompt, now=self.now)
        self.leases.append(lease)
        self.check()
        return lease

    def feed(self, lease: Lease, count: int, *, confirm: bool = True) -> int:
        """A row of at most `count` tokens, as far as pages and snapshots allow; what it must read is checked. Tokens fed."""
        start = lease.computed
        end = min(start + count, len(lease.tokens), self.cache.room(lease))
        stop = self.cache.next_stop(lease, start)
        end = end if stop is None else min(end, stop)
        if end <= start:
            return 0
        self.cache.extend(lease, end)
        copies = self.cache.begin(lease, start)
        assert self.cache.begin(lease, start) == copies, "a retried step gets other copies"
        self._copy(copies)
        self._read(lease, start)
        self._write(lease, start, end)
        if confirm:
            self.cache.confirm(lease, end, self.now)
            self.check()
        return end - start

    def close(self, lease: Lease, *, settled: bool = True) -> None:
        """Unless `settled`, a row of it is on its way and is written after the end, where it was told to."""
        pages, computed = [list(pages) for pages in lease.pages], lease.computed
        self.leases.remove(lease)
        self.cache.close(lease, self.now, settled=settled)
        self.check()
        if not settled and not lease.copies:
            self._write_late(pages, computed)

    def discard(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.cache.discard(lease)
        self.check()

    def through(self, tokens: list[int], **fields: object) -> int:
        """A whole sequence, computed at once and closed. Gives its hit."""
        lease = self.open(list(tokens), **fields)  # pyright: ignore[reportArgumentType]
        hit = lease.hit
        while lease.computed < len(tokens):
            assert self.feed(lease, 1000)
        self.close(lease)
        return hit

    def check(self) -> None:
        self.cache.check(self.leases)

    # --- memory ----------------------------------------------------------------------------------------------------------------

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        targets = {(group, target) for group, _, target in copies}
        assert not targets & {(group, source) for group, source, _ in copies}
        for group, source, target in copies:
            for offset in range(PAGE_TOKENS):
                if (group, source, offset) in self.memory:
                    self.memory[group, target, offset] = self.memory[group, source, offset]

    def _read(self, lease: Lease, start: int) -> None:
        """All that a query at `start` sees must be this sequence's own history."""
        for group, kind in enumerate(self.kinds):
            if kind == "state":
                held = self.memory.get((group, lease.pages[group][0], 0))
                assert start == 0 or held == self._after(lease, start), "a wrong state"
                continue
            first = 0 if not isinstance(kind, int) else max(0, start - kind + 1)
            for position in range(first, start):
                page = lease.pages[group][position // PAGE_TOKENS]
                assert page != NO_PAGE, "a page that can be seen is gone"
                held = self.memory[group, page, position % PAGE_TOKENS]
                assert held == self._after(lease, position + 1), "a page of somebody else"

    def _write(self, lease: Lease, start: int, end: int) -> None:
        for group, kind in enumerate(self.kinds):
            if kind == "state":
                self.memory[group, lease.pages[group][0], 0] = self._after(lease, end)
                continue
            for position in range(start, end):
                page = lease.pages[group][position // PAGE_TOKENS]
                self.memory[group, page, position % PAGE_TOKENS] = self._after(lease, position + 1)

    def _write_late(self, pages: list[list[int]], position: int) -> None:
        late: Written = (Namespace(salt="late"), ())
        for group, kind in enumerate(self.kinds):
            number = 0 if kind == "state" else position // PAGE_TOKENS
            if number < len(pages[group]):
                offset = 0 if kind == "state" else position % PAGE_TOKENS
                self.memory[group, pages[group][number], offset] = late

    def _after(self, lease: Lease, count: int) -> Written:
        return lease.namespace, tuple(lease.tokens[:count])
