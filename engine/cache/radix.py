"""The tree of cached prefixes: a node for each page of token ids, a root for each namespace.

The key of a node is its token ids, as bytes: Python hashes bytes with a random seed and compares them whole, so a hash that
collides gives nobody another's page. A node of fewer than PAGE_TOKENS ids is a `tail`: the end of a finished sequence, beside the
children of its parent and never above others. Owns the shape only; who holds the pages is engine/cache/blocks.py, who goes is
eviction.py.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.runtime.batch import NO_PAGE, PAGE_TOKENS
from engine.types import Retention

if TYPE_CHECKING:
    from engine.cache.lease import Lease

RANKS: dict[Retention, int] = {"rest": 0, "chat": 1}
PINNED = 2

ID_BYTES = array("i").itemsize
KEY_BYTES = PAGE_TOKENS * ID_BYTES
NEIGHBOURS = 4  # looked at on each side; the first is the best, the others stand in when it lacks a page


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides the token ids must be equal for a page to be shared. All but `format` are digests or opaque words."""

    model: str = ""
    format: str = ""  # of weights and cache: what computed the page
    adapter: str = ""
    salt: str = ""


@dataclass(slots=True, eq=False)
class Node:
    """`pages` has one for each cache group: NO_PAGE where it is gone, or never was (a state without a snapshot)."""

    key: bytes
    parent: Node | None
    depth: int  # pages from the root to its end
    pages: list[int]
    used: float = 0.0
    rank: int = 0
    alive: bool = True
    children: dict[bytes, Node] = field(default_factory=dict)
    tails: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)  # keys of children and tails, sorted: neighbours begin alike
    leases: set[Lease] = field(default_factory=set)  # running sequences that have this as their deepest node
    offered: int = 0  # bit for each group whose queue of candidates for eviction holds it

    @property
    def size(self) -> int:
        """Tokens of its page."""
        return len(self.key) // ID_BYTES

    @property
    def end(self) -> int:
        """Tokens from the start of the sequence to its end."""
        return (self.depth - 1) * PAGE_TOKENS + self.size

    @property
    def is_tail(self) -> bool:
        return len(self.key) < KEY_BYTES

    @property
    def is_leaf(self) -> bool:
        return not (self.order or self.leases)

    def below(self, key: bytes) -> Node:
        """The child or tail with this key."""
        return self.children[key] if len(key) == KEY_BYTES else self.tails[key]

    def alike(self, rest: bytes) -> list[Node]:
        """Nodes below that begin most like `rest`: of sorted keys they are the neighbours of where it would stand."""
        at = bisect_left(self.order, rest)
        return [self.below(key) for key in self.order[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]]

    def starting_with(self, rest: bytes) -> bool:
        """Whether a child or tail says all of `rest`, and perhaps more."""
        at = bisect_left(self.order, rest)
        return at < len(self.order) and self.order[at].startswith(rest)

    def tails_within(self, key: bytes) -> list[Node]:
        """Tails that `key` begins with, itself included."""
        ends = range(ID_BYTES, min(len(key), KEY_BYTES - ID_BYTES) + 1, ID_BYTES)
        return [self.tails[key[:end]] for end in ends if key[:end] in self.tails]


def key_of(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """How many first ids two keys share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // ID_BYTES
    return next(at for at in range(0, most, ID_BYTES) if one[at : at + ID_BYTES] != other[at : at + ID_BYTES]) // ID_BYTES


class RadixTree:
    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._roots: dict[Namespace, Node] = {}
        self._names: dict[Node, Namespace] = {}  # the same, from root to namespace
        self._vacant: set[Node] = set()  # roots that held nothing when they were last looked at

    def root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(b"", None, 0, [NO_PAGE] * self._groups)
            self._names[root] = namespace
        return root

    def path(self, namespace: Namespace, data: bytes, limit: int) -> list[Node]:
        """The root and the nodes of the whole pages of `data` that are there, within `limit` tokens."""
        node = self._roots.get(namespace)
        path = [] if node is None else [node]
        for at in range(0, limit // PAGE_TOKENS * KEY_BYTES, KEY_BYTES):
            node = node.children.get(data[at : at + KEY_BYTES]) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def add(self, parent: Node, key: bytes) -> Node:
        """A new node below `parent`, without pages. There is none with this key."""
        node = Node(key, parent, parent.depth + 1, [NO_PAGE] * self._groups)
        line = parent.children if len(key) == KEY_BYTES else parent.tails
        assert key not in line, "a page is in the tree twice"
        line[key] = node
        insort(parent.order, key)
        return node

    def cut(self, node: Node) -> None:
        """Take a leaf out."""
        assert node.is_leaf and node.parent is not None and node.alive, "only leaves can be cut"
        line = node.parent.children if len(node.key) == KEY_BYTES else node.parent.tails
        del line[node.key]
        del node.parent.order[bisect_left(node.parent.order, node.key)]
        node.alive = False

    def vacate(self, root: Node) -> None:
        """Have `root` forgotten with the next `forget_empty`, if it holds nothing now nor then."""
        if root.is_leaf:
            self._vacant.add(root)

    def forget_empty(self) -> None:
        """Drop the roots of namespaces that hold nothing. Looks at those alone that were vacated."""
        for root in self._vacant:
            if root.is_leaf and root in self._names:
                del self._roots[self._names.pop(root)]
        self._vacant.clear()

    def pinned(self) -> Iterator[Node]:
        """The pinned nodes: whatever is above one is pinned as well."""
        stack = list(self._roots.values())
        while stack:
            found = [node for node in stack.pop().children.values() if node.rank == PINNED]
            yield from found
            stack += found

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, each after all that is below it."""
        stack = [(root, False) for root in self._roots.values()]
        while stack:
            node, seen = stack.pop()
            if seen:
                yield node
                continue
            if node.parent is not None:
                stack.append((node, True))
            stack += [(child, False) for child in (*node.children.values(), *node.tails.values())]
