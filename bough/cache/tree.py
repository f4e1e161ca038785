"""The tree: which token paths are held, and on which tier each piece of them is.

A node is an edge of symbols (token ids; a replayed trace may use one symbol for many tokens) from its parent's end to
its own, and for each tier at most one copy of what the edge takes. Copies are opaque here: they can be split with the
edge, joined with a neighbour, and closed. The tree decides nothing and moves no data; it has no clock of its own.

Invariants (`check()` asserts them):
- Siblings differ in their first symbol; no edge is empty but a root's.
- Every node but a root has a copy; one with a copy on the device has a parent with one.
- pins(node) is at least that of each child: whoever pins a node pins the path to it.
- Trees of different salts share nothing.

`match` never changes anything. Its cost is that of comparing the prompt once, however large the tree is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.int32]


class Tier(IntEnum):
    """Where a copy lies; lower is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2


NOWHERE = len(Tier)


class Copy(Protocol):
    """What a tier holds of one edge."""

    @property
    def resumes(self) -> bool:
        """Whether it holds what it takes to go on at the end of the edge."""

    @property
    def is_sound(self) -> bool:
        """Whether it can still be used; bytes on a disk may turn out to be damaged."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that closing it would give back."""

    def split(self, at: int) -> "tuple[Copy | None, Copy | None]":
        """The copies of [start, at) and [at, end); takes this one over. The right one keeps the resume point."""

    def join(self, right: Any) -> "Copy":
        """One copy of this edge and the next; takes both over. The resume point between them goes."""

    def with_point(self, other: Any) -> "Copy":
        """This edge with the resume point of another copy of it; takes both over."""

    def without_point(self) -> "Copy":
        """The edge alone; takes this one over."""

    def close(self) -> None: ...


class Node:
    """An edge, where it hangs, what is held of it, and what is known about its use."""

    __slots__ = ("children", "copies", "facts", "near", "parent", "pins", "start", "symbols", "used", "uses")

    def __init__(self, symbols: Symbols, start: int, parent: "Node | None", used: float) -> None:
        self.symbols, self.start, self.parent = symbols, start, parent
        self.children: dict[int, Node] = {}  # by first symbol
        self.copies: list[Copy | None] = [None] * NOWHERE
        self.near = [0] * NOWHERE  # for each tier, how many children have a copy on it or on a faster one
        self.pins = 0
        self.used = used  # when it last served a request
        self.uses = 0  # how many requests it served since the one that made it
        self.facts: object = None  # whatever a policy remembers about it

    @property
    def end(self) -> int:
        return self.start + len(self.symbols)

    @property
    def best(self) -> int:
        """The fastest tier with a copy."""
        return next((tier for tier, copy in enumerate(self.copies) if copy is not None), NOWHERE)

    def is_leaf(self, tier: int) -> bool:
        """Whether nothing below it is on this tier or a faster one."""
        return not self.near[tier]

    @property
    def resumes(self) -> bool:
        """Whether some tier can bring back what it takes to go on at its end."""
        return any(copy is not None and copy.resumes for copy in self.copies)

    def root(self) -> "Root":
        node = self
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root), f"{self} left the tree"
        return node

    def path(self) -> "list[Node]":
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def __repr__(self) -> str:
        tiers = "".join(
            "-" if copy is None else tier.name[0] if copy.resumes else tier.name[0].lower()
            for tier, copy in zip(Tier, self.copies, strict=True)
        )
        return f"Node[{self.start}, {self.end}) {tiers} uses {self.uses} pins {self.pins}"


class Root(Node):
    """Where the paths of one salt begin."""

    __slots__ = ("salt",)

    def __init__(self, salt: bytes, used: float) -> None:
        super().__init__(np.empty(0, np.int32), 0, None, used)
        self.salt = salt


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a prompt agrees with the tree: the nodes it passes, the last one perhaps in part."""

    nodes: list[Node]
    matched: int  # symbols

    @property
    def ends_inside(self) -> bool:
        """Whether the last node goes on past what was matched."""
        return bool(self.nodes) and self.nodes[-1].end > self.matched


class Watcher(Protocol):
    """Whoever keeps count of nodes by what they hold."""

    def changed(self, node: Node) -> None:
        """It is new, has another edge, or it or a child of it got or lost a copy or a resume point."""

    def removed(self, node: Node) -> None:
        """It has left the tree."""


@dataclass(slots=True)
class Tree:
    """All paths held, one root for each salt."""

    watcher: Watcher | None = None
    roots: dict[bytes, Root] = field(default_factory=dict)
    size: int = 0  # nodes, roots not counted

    def match(self, salt: bytes, symbols: Sequence[int] | Symbols) -> Walk:
        """The longest path that the symbols begin with."""
        wanted = as_symbols(symbols)
        node: Node | None = self.roots.get(salt)
        at, end, nodes, given = 0, len(wanted), list[Node](), wanted.tobytes()
        while node is not None and at < end:
            node = node.children.get(wanted.item(at))
            if node is None:
                break
            nodes.append(node)
            edge = node.symbols.tobytes()  # a path may be long: to compare bytes is the least that an edge takes
            if given[4 * at : 4 * at + len(edge)] != edge:
                at += common(node.symbols, wanted[at:])
                break
            at += len(edge) // 4
        return Walk(nodes, at)

    def grow(self, salt: bytes, symbols: Sequence[int] | Symbols, now: float) -> Node:
        """The node that ends exactly where the symbols do, made by splitting an edge or adding a leaf if need be.

        A new leaf has no copy: whoever grows it gives it one, or takes it away again with `remove`.
        """
        wanted = as_symbols(symbols)
        assert len(wanted), "a root is not grown"
        walk = self.match(salt, wanted)
        parent = walk.nodes[-1] if walk.nodes else self.roots.setdefault(salt, Root(salt, now))
        if walk.ends_inside:
            parent = self.split(parent, walk.matched)
        if walk.matched == len(wanted):
            return parent
        leaf = Node(wanted[walk.matched :].copy(), walk.matched, parent, now)
        parent.children[int(leaf.symbols[0])] = leaf
        self.size += 1
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Cut an edge in two; returns the new left part. The node itself stays the right part, with all it knows."""
        assert node.parent is not None and node.start < at < node.end, f"{node} cannot be split at {at}"
        left = Node(node.symbols[: at - node.start].copy(), node.start, node.parent, node.used)
        left.uses, left.pins = node.uses, node.pins
        for tier, copy in enumerate(node.copies):
            if copy is not None:
                left.copies[tier], node.copies[tier] = copy.split(at)
        left.near = [int(node.best <= tier) for tier in Tier]
        node.parent.children[int(left.symbols[0])] = left
        node.symbols = node.symbols[at - node.start :].copy()
        node.start, node.parent = at, left
        left.children[int(node.symbols[0])] = node
        self.size += 1
        self._tell(left, node)
        return left

    def put(self, node: Node, tier: int, copy: Copy | None) -> None:
        """Let the node have this copy on a tier, or none. What it had there is the caller's."""
        before = node.best
        node.copies[tier] = copy
        self._moved(node, before, node.best)

    def _moved(self, node: Node, before: int, after: int) -> None:
        assert node.parent is not None
        for tier in range(min(before, after), max(before, after)):
            node.parent.near[tier] += 1 if after < before else -1
        self._tell(node, node.parent)

    def _tell(self, *nodes: Node) -> None:
        for node in nodes:
            if self.watcher is not None and node.parent is not None and node.best < NOWHERE:
                self.watcher.changed(node)

    def can_merge(self, node: Node) -> bool:
        """Whether the node may be joined with its only child: nobody pins it, and both are on the same tiers."""
        if node.parent is None or node.pins or len(node.children) != 1:
            return False
        (child,) = node.children.values()
        return [copy is None for copy in node.copies] == [copy is None for copy in child.copies]

    def merge(self, node: Node) -> Node:
        """Join a node with its only child, which stays, and loses the resume point between them."""
        assert self.can_merge(node), f"{node} cannot be merged"
        (child,) = node.children.values()
        assert node.parent is not None
        for tier, (left, right) in enumerate(zip(node.copies, child.copies, strict=True)):
            if left is not None and right is not None:
                child.copies[tier] = left.join(right)
        child.symbols = np.concatenate([node.symbols, child.symbols])
        child.start, child.parent = node.start, node.parent
        node.parent.children[int(child.symbols[0])] = child
        node.parent = None
        node.children, node.copies = {}, [None] * NOWHERE
        self.size -= 1
        if self.watcher is not None:
            self.watcher.removed(node)
        self._tell(child)
        return child

    def remove(self, leaf: Node) -> None:
        """Take a leaf away, and close what is held of it. A root without children goes too."""
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.pins, f"{leaf} is still needed"
        for copy in leaf.copies:
            if copy is not None:
                copy.close()
        before = leaf.best
        leaf.copies = [None] * NOWHERE
        self._moved(leaf, before, NOWHERE)
        del parent.children[int(leaf.symbols[0])]
        leaf.parent = None
        self.size -= 1
        if self.watcher is not None:
            self.watcher.removed(leaf)
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.salt]

    def pin(self, node: Node) -> None:
        """Keep the node and the path to it until `unpin`."""
        for each in node.path():
            each.pins += 1

    def unpin(self, node: Node) -> None:
        for each in node.path():
            assert each.pins > 0, f"{each} is not pinned"
            each.pins -= 1

    def walk(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self.roots.values() for child in reversed(root.children.values())]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def check(self) -> None:
        count = 0
        for root in self.roots.values():
            assert root.parent is None and not len(root.symbols) and root.children, "a root is no root, or is empty"
        for node in self.walk():
            count += 1
            parent = node.parent
            assert parent is not None and node.start == parent.end and len(node.symbols), f"{node} hangs wrong"
            assert parent.children[int(node.symbols[0])] is node, f"{node} is listed under another symbol"
            assert node.best < NOWHERE, f"{node} holds nothing"
            near = [sum(child.best <= tier for child in node.children.values()) for tier in Tier]
            assert near == node.near, f"{node} miscounts its children: {node.near}, not {near}"
            if parent.parent is not None:
                assert parent.pins >= node.pins, f"{node} is pinned more than its parent {parent}"
                assert node.best > Tier.DEVICE or parent.best == Tier.DEVICE, f"{parent} left the device before {node}"
        assert count == self.size, f"{self.size} nodes are counted, {count} are there"


def as_symbols(symbols: Sequence[int] | Symbols) -> Symbols:
    return np.asarray(symbols, np.int32)


def common(a: Symbols, b: Symbols) -> int:
    """How many symbols both begin with."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
