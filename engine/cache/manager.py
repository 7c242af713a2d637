"""The cache as the scheduler sees it: leases on pages, prefixes found and kept, room made.

    open -> [extend, begin, confirm] ... -> close     pages: free -> owned -> owned and kept -> cached -> evicted, or owned again

A prefix hit is the longest length that all groups can serve together: whole pages are shared, the rest of the last one is copied.
Not here: the tree's shape (radix.py), counts of holders (blocks.py), who leaves (eviction.py), where states are kept (state.py).
Invariants (`check`): what a lease reads, the tree keeps or the lease alone writes; free + owned + cached + pinned are all pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from engine.cache import accounts, state
from engine.cache.blocks import PageGroup, pages_for
from engine.cache.eviction import Eviction
from engine.cache.layout import CacheLayout
from engine.cache.lease import UNBOUNDED_TOKENS, Copy, Lease
from engine.cache.matching import Match, Matcher, fits
from engine.cache.radix import ID_BYTES, PINNED, RANKS, Namespace, Node, RadixTree, key_of
from engine.runtime.batch import NO_PAGE, PAGE_TOKENS
from engine.types import Retention


class CacheManager:
    def __init__(
        self,
        layout: CacheLayout,
        pages: Sequence[int],
        *,
        sharing: bool = True,
        chat_retention_s: float = 1800.0,
        rest_retention_s: float = 300.0,
    ) -> None:
        """`pages` has one count for each group of `layout`. Without `sharing` nothing is looked up and nothing kept."""
        assert len(pages) == len(layout.groups), "one page count for each cache group"
        self.groups = tuple(PageGroup(group, count) for group, count in zip(layout.groups, pages, strict=True))
        self._sharing = sharing
        self._growing = [index for index, group in enumerate(self.groups) if group.grows]
        self._states = [index for index, group in enumerate(self.groups) if not group.grows]
        self._tree = RadixTree(len(self.groups))
        self._matcher = Matcher(self._tree, self.groups)
        self._eviction = Eviction(self._tree, self.groups, (rest_retention_s, chat_retention_s))
        self._leases: set[Lease] = set()

    # --- counts --------------------------------------------------------------------------------------------------------------

    @property
    def total_pages(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def used_pages(self) -> int:
        return sum(group.owned for group in self.groups)

    @property
    def cached_pages(self) -> int:
        return sum(group.cached for group in self.groups)

    @property
    def pinned_pages(self) -> int:
        return sum(group.pinned for group in self.groups)

    @property
    def evicted_pages(self) -> int:
        return self._eviction.evicted_pages

    def held(self) -> list[list[int]]:
        """Pages of each group that are not free."""
        return [list(group.held()) for group in self.groups]

    def filled(self) -> tuple[int, int]:
        """(slots with a computed token, slots) of the pages, owned or kept, of groups that grow."""
        return accounts.filled(self.groups, self._tree, self._leases)

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise AssertionError unless everything adds up, counted afresh from `leases`, which must be all, and the tree."""
        leases = list(leases)
        assert set(leases) == self._leases and len(leases) == len(self._leases), "leases known and found differ"
        accounts.check(self.groups, self._tree, leases)

    # --- questions -----------------------------------------------------------------------------------------------------------

    def probe(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix that all groups can serve now; at least one is left to compute."""
        return self._find(namespace, key_of(tokens)).hit

    def shortage(self, tokens: int) -> tuple[int, int] | None:
        """(pages needed, pages there are beside pinned ones) of a group that can never hold so many tokens of a sequence."""
        for group in self.groups:
            if group.need(tokens) > group.total - group.all_pinned:
                return group.need(tokens), group.total - group.all_pinned
        return None

    def can_start(self, namespace: Namespace, tokens: Sequence[int], spare: int) -> bool:
        """Whether a sequence of these tokens fits now, fed in chunks, and leaves `spare` pages of each growing group at hand."""
        match = self._find(namespace, key_of(tokens))
        return all(fits(group, index, match, len(tokens), spare) for index, group in enumerate(self.groups))

    def can_pin(self, tokens: int, context_tokens: int, promised: int) -> bool:
        """Whether a prompt of `tokens` may be pinned, besides `promised` pages, and one full context still fits in each group."""
        wanted = sum(1 for _ in self._tree.pinned()) + promised + pages_for(tokens)  # a pinned node may lack a page, and get it
        return all(wanted + group.need(context_tokens) <= group.total for group in self.groups)

    def room(self, lease: Lease) -> int:
        """Tokens that `lease` could cover if it took every page at hand."""
        if not self._growing:
            return UNBOUNDED_TOKENS
        return lease.capacity + min(self.groups[group].at_hand for group in self._growing) * PAGE_TOKENS

    def given_back(self, leases: Iterable[Lease]) -> int:
        """Pages of each growing group that are at hand once these leases are closed, at least."""
        leases = list(leases)
        back = UNBOUNDED_TOKENS
        for index in self._growing:
            held = Counter(page for lease in leases for page in lease.pages[index][lease.first[index] :])
            back = min(back, sum(self.groups[index].owners(page) == count for page, count in held.items()))
        return back

    def next_stop(self, lease: Lease, start: int) -> int | None:
        """Where a row that begins at `start` must end at the latest, because a snapshot of the state is due; None: anywhere."""
        return state.next_stop(lease.stops, start) if self._states and self._sharing else None

    # --- the life of a lease -------------------------------------------------------------------------------------------------

    def open(
        self,
        namespace: Namespace,
        tokens: list[int],
        *,
        retention: Retention,
        pin: bool | None,
        prompt_tokens: int,
        now: float,
    ) -> Lease:
        """A lease for a sequence with `tokens`, a list that the caller goes on to append to. Its `hit` tokens are there already."""
        data = key_of(tokens)
        if pin is False:
            self._unpin(namespace, data[: prompt_tokens * ID_BYTES], RANKS[retention])
        lease = Lease(
            namespace,
            tokens,
            RANKS[retention],
            prompt_tokens if pin else 0,
            pages=[[] for _ in self.groups],
            first=[0] * len(self.groups),
            root=self._tree.root(namespace),
            growing=self._growing[0] if self._growing else -1,
        )
        self._leases.add(lease)
        for match in self._less_and_less(namespace, data):
            self._share(lease, match)
            if self._copy_rest(lease, match):
                break
            self._unshare(lease)
        else:
            raise AssertionError("there is no page for a state")
        lease.hit = lease.computed = match.hit
        if self._states:
            lease.stops = state.stops_of(len(tokens), match.branch, match.hit)
        lease.node.leases.add(lease)
        self._touch(lease, now)
        for copy in lease.copies:
            if home := self._eviction.home(copy.group, copy.source):
                home.used, home.rank = max(home.used, now), max(home.rank, lease.rank)
        return lease

    def extend(self, lease: Lease, tokens: int) -> None:
        """Let `lease` cover `tokens` tokens, evicting what it must. The caller has checked `room`."""
        for group in self._growing:
            pages = lease.pages[group]
            pages.extend(self._take(group) for _ in range(pages_for(tokens) - len(pages)))

    def shrink(self, lease: Lease, tokens: int) -> None:
        """Give back pages behind those that `tokens` tokens fill: what lay there was drafted, and wrong."""
        for group in self._growing:
            pages = lease.pages[group]
            while len(pages) > pages_for(tokens):
                self._eviction.disown(group, pages.pop())

    def begin(self, lease: Lease, start: int) -> list[tuple[int, int, int]]:
        """(group, source, target) to be copied before a row that begins at `start`. Asked again for the same row, the same."""
        if start == lease.hit:
            return [(copy.group, copy.source, copy.target) for copy in lease.copies]
        if not self._states or not self._sharing or not state.is_stop(lease.stops, start):
            return []
        if start not in lease.snapshots:
            if any(self.groups[group].at_hand == 0 for group in self._states):
                return []
            lease.snapshots[start] = [(group, self._take(group)) for group in self._states]
        return [(group, lease.pages[group][0], page) for group, page in lease.snapshots[start]]

    def confirm(self, lease: Lease, computed: int, now: float) -> None:
        """The first `computed` tokens are in the cache. Full pages are kept from now on; twins are merged; windows move on."""
        lease.computed = computed
        if lease.copies and computed > lease.hit:
            self._release_copies(lease)
        if self._sharing:
            while computed - lease.registered >= PAGE_TOKENS:
                self._register(lease, now)
            for position in [position for position in lease.snapshots if position < computed]:
                self._attach(lease, lease.path[position // PAGE_TOKENS - 1], lease.snapshots.pop(position))
        self._trim(lease)

    def close(self, lease: Lease, now: float, *, settled: bool) -> None:
        """The sequence ended or was preempted: what it computed stays as a cached prefix, to its last token.

        `settled`: no step of it is in flight, so that its live state is that of the last token and can stay too.
        """
        if self._sharing and not lease.copies:
            self._keep_rest(lease, now, settled=settled)
        self._touch(lease, now)
        self._release(lease)

    def discard(self, lease: Lease) -> None:
        """The sequence failed: nothing that it alone computed stays."""
        brought = list(lease.brought)
        self._release(lease)
        for node, index, page in reversed(brought):
            if node.alive and node.pages[index] == page:
                self._eviction.drop(node, index)

    def expire(self, now: float) -> float | None:
        """Drop what was not used for its time. When to ask again; None: nothing waits for it."""
        return self._eviction.expire(now)

    def grow(self, pages: Sequence[int]) -> None:
        """Have `pages` pages of each group from now on."""
        for group, count in zip(self.groups, pages, strict=True):
            group.grow(count)

    def clear(self) -> None:
        """Drop all that nobody owns, pinned or not."""
        for node in list(self._tree.nodes()):
            for index in range(len(self.groups)):
                if node.alive and node.pages[index] != NO_PAGE:
                    self._eviction.drop(node, index)
        self._tree.forget_empty()

    # --- pieces --------------------------------------------------------------------------------------------------------------

    def _find(self, namespace: Namespace, data: bytes, *, whole_pages: bool = False) -> Match:
        return self._matcher.find(namespace, data, whole_pages=whole_pages) if self._sharing else Match()

    def _less_and_less(self, namespace: Namespace, data: bytes) -> Iterator[Match]:
        """The best match, and what to be content with when there are no pages to copy to."""
        match = self._find(namespace, data)
        yield match
        yield self._find(namespace, data, whole_pages=True)
        yield Match(branch=match.branch)

    def _take(self, index: int) -> int:
        self._eviction.make_free(index)
        return self.groups[index].take()

    def _share(self, lease: Lease, match: Match) -> None:
        """Own the whole pages of a match, from the first that a query after it can see."""
        lease.path = list(match.path)
        for index in self._growing:
            first = match.first[index] if match.first else 0
            shared = [node.pages[index] for node in match.path[first:]]
            for page in shared:
                self.groups[index].own(page)
            lease.pages[index] = [NO_PAGE] * first + shared
            lease.first[index] = first

    def _unshare(self, lease: Lease) -> None:
        for index in self._growing:
            for page in lease.pages[index][lease.first[index] :]:
                self._eviction.disown(index, page)

    def _copy_rest(self, lease: Lease, match: Match) -> bool:
        """Own the sources of what is to be copied and take pages for it; for a state without a source, the live page alone.

        False, and nothing is taken, when there are not enough pages.
        """
        sources = [(index, page) for index, page in enumerate(match.sources) if page != NO_PAGE]
        for index, page in sources:
            self.groups[index].own(page)
        wanted = {index for index, _ in sources} | set(self._states)
        if any(self.groups[index].at_hand == 0 for index in wanted):
            for index, page in sources:
                self._eviction.disown(index, page)
            return False
        targets = {index: self._take(index) for index in sorted(wanted)}
        for index, target in targets.items():
            lease.pages[index].append(target)
        lease.copies = [Copy(index, page, targets[index]) for index, page in sources]
        return True

    def _release_copies(self, lease: Lease) -> None:
        copies, lease.copies = lease.copies, []
        for copy in copies:
            self._eviction.disown(copy.group, copy.source)

    def _register(self, lease: Lease, now: float) -> None:
        """Put the next full page of `lease` into the tree, or find it there and give ours back."""
        at, parent = lease.registered, lease.node
        key = key_of(lease.tokens[at : at + PAGE_TOKENS])
        node = parent.children.get(key)
        if node is None:
            node = self._tree.add(parent, key)
            self._drop_tails(parent, key)
        parent.leases.discard(lease)
        node.leases.add(lease)
        lease.path.append(node)
        node.used = max(node.used, now)
        node.rank = max(node.rank, PINNED if node.end <= lease.pin_tokens else lease.rank)
        for index in self._growing:
            self._merge(lease, node, index, at // PAGE_TOKENS)
        if node.rank == PINNED:
            self._eviction.pin(node)

    def _merge(self, lease: Lease, node: Node, index: int, number: int) -> None:
        """Page `number` of a lease and its node become one: the one that is there stays."""
        group, ours, theirs = self.groups[index], lease.pages[index][number], node.pages[index]
        if ours in (NO_PAGE, theirs):
            return
        if theirs == NO_PAGE:
            self._hang(lease, node, index, ours)
            return
        group.own(theirs)
        group.disown(ours)
        lease.pages[index][number] = theirs

    def _drop_tails(self, parent: Node, key: bytes) -> None:
        """Tails that a fuller page says all of. With a state they are snapshots of their own, and stay."""
        if self._states:
            return
        for tail in parent.tails_within(key):
            if len(tail.key) < len(key) and not self._eviction.owned(tail):
                self._eviction.remove(tail)

    def _hang(self, lease: Lease, node: Node, index: int, page: int) -> None:
        self._eviction.hang(node, index, page)
        lease.brought.append((node, index, page))

    def _attach(self, lease: Lease, node: Node, pages: list[tuple[int, int]]) -> None:
        """Hang a snapshot at a node, unless it has one."""
        for index, page in pages:
            if node.pages[index] == NO_PAGE:
                self._hang(lease, node, index, page)
            self._eviction.disown(index, page)

    def _trim(self, lease: Lease) -> None:
        """Give back the pages of window groups that no later query can see."""
        for index in self._growing:
            window = self.groups[index].window_tokens
            if window is None:
                continue
            pages, first = lease.pages[index], lease.first[index]
            keep = min(max((lease.computed - window + 1) // PAGE_TOKENS, first), len(pages))
            for number in range(first, keep):
                self._eviction.disown(index, pages[number])
                pages[number] = NO_PAGE
            lease.first[index] = keep

    def _keep_rest(self, lease: Lease, now: float, *, settled: bool) -> None:
        """Keep the tokens beyond the last full page as a tail, and the live state where it belongs."""
        rest = key_of(lease.tokens[lease.registered : lease.computed])
        node = lease.node
        if self._states and (not settled or not lease.computed):
            return
        if rest:
            if (rest in node.tails) if self._states else node.starting_with(rest):
                return
            self._drop_tails(node, rest)
            parent, node = node, self._tree.add(node, rest)
            node.used, node.rank = now, lease.rank
            for index in self._growing:
                self._merge(lease, node, index, parent.depth)
        for index in self._states:
            if node.parent is not None and node.pages[index] == NO_PAGE:
                self._hang(lease, node, index, lease.pages[index][0])

    def _touch(self, lease: Lease, now: float) -> None:
        for node in lease.path:
            node.used = max(node.used, now)
            node.rank = max(node.rank, lease.rank)
            if node.rank < PINNED and node.end <= lease.pin_tokens:
                self._eviction.pin(node)

    def _release(self, lease: Lease) -> None:
        """Let go of everything; what the tree keeps becomes a candidate for eviction."""
        lease.node.leases.discard(lease)
        self._release_copies(lease)
        for pages in lease.snapshots.values():
            for index, page in pages:
                self._eviction.disown(index, page)
        for index in range(len(self.groups)):
            for page in reversed(lease.pages[index][lease.first[index] :]):
                self._eviction.disown(index, page)
        self._eviction.prune(lease.node)
        lease.pages = [[] for _ in self.groups]
        lease.snapshots, lease.brought, lease.path = {}, [], []
        self._leases.discard(lease)

    def _unpin(self, namespace: Namespace, data: bytes, rank: int) -> None:
        """The nodes of a prompt are pinned no longer, from the last up to one that another pinned prompt needs."""
        for node in reversed(self._tree.path(namespace, data, len(data) // ID_BYTES)[1:]):
            passing = [lease for lease in self._leases if node in lease.path[node.depth - 1 : node.depth]]
            below = max([rank, *(node.below(key).rank for key in node.order), *(lease.rank for lease in passing)])
            if below == PINNED or any(node.end <= lease.pin_tokens for lease in passing):
                return
            if node.rank == PINNED:
                self._eviction.unpin(node, below)
