"""The tree against a dictionary: random walks over everything that can be done to it, checked after each step."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from bough.cache.tree import NOWHERE, Node, Tier, Tree, common

Path = tuple[int, ...]


@dataclass(eq=False)
class Fake:
    """A copy that knows the path up to its end, and all copies that are open."""

    path: Path
    start: int
    point: bool
    opened: set["Fake"] = field(repr=False)
    is_sound: bool = True

    def __post_init__(self) -> None:
        self.opened.add(self)

    @property
    def resumes(self) -> bool:
        return self.point

    @property
    def freed_bytes(self) -> int:
        return len(self.path) - self.start

    def split(self, at: int) -> tuple["Fake", "Fake"]:
        self.close()
        return Fake(self.path[:at], self.start, False, self.opened), Fake(self.path, at, self.point, self.opened)

    def join(self, right: "Fake") -> "Fake":
        assert right.path[: len(self.path)] == self.path and right.start == len(self.path)
        self.close()
        right.close()
        return Fake(right.path, self.start, right.point, self.opened)

    def with_point(self, other: "Fake") -> "Fake":
        assert (self.path, self.start) == (other.path, other.start)
        self.close()
        other.close()
        return Fake(self.path, self.start, other.point, self.opened)

    def without_point(self) -> "Fake":
        self.close()
        return Fake(self.path, self.start, False, self.opened)

    def close(self) -> None:
        self.opened.remove(self)  # twice is an error


class Seen:
    """A watcher that keeps what it was told of."""

    def __init__(self) -> None:
        self.nodes: dict[Node, tuple] = {}

    def changed(self, node: Node) -> None:
        assert node.parent is not None and node.best < NOWHERE
        self.nodes[node] = _facts(node)

    def removed(self, node: Node) -> None:
        del self.nodes[node]


def _facts(node: Node) -> tuple:
    """What a policy judges by."""
    return node.start, node.end, [copy and copy.resumes for copy in node.copies], list(node.near)


def _print(tree: Tree) -> list:
    """All there is to see of a tree."""
    return [
        (node, node.symbols.tolist(), _facts(node), list(node.copies), node.pins, node.used, node.uses, node.parent)
        for node in tree.walk()
    ]


class Walk:
    """A tree, and beside it the same in dictionaries: the paths held, and where each tier has resume points."""

    def __init__(self, seed: int) -> None:
        self.dice, self.watcher = Random(seed), Seen()
        self.tree, self.opened = Tree(self.watcher), set()
        self.held: dict[bytes, dict[Path, None]] = {b"a": {}, b"b": {}}  # by salt: every prefix of every path
        self.points: set[tuple[int, bytes, Path]] = set()
        self.pins: list[Node] = []

    def some(self) -> tuple[bytes, Path]:
        """A path that mostly begins like one that is held."""
        salt = self.dice.choice([b"a", b"b"])
        known = self.dice.choice(list(self.held[salt]) or [()])
        new = tuple(self.dice.randrange(3) for _ in range(self.dice.choice([0, 0, 1, 2, 6])))
        return salt, known[: self.dice.choice([len(known), self.dice.randint(0, len(known))])] + new

    def any(self) -> Node | None:
        nodes = list(self.tree.walk())
        return self.dice.choice(nodes) if nodes else None

    def step(self) -> None:
        actions = [self.keep, self.keep, self.copy, self.split, self.merge, self.drop, self.point, self.remove,
                   self.pin, self.unpin]  # fmt: skip
        self.dice.choice(actions)()
        self.look()
        self.check()

    def keep(self) -> None:
        """As an admission does it: a path is grown, and gets on the device what of it is not there."""
        salt, path = self.some()
        if path:
            node = self.tree.grow(salt, path, now=1.0)
            assert path_of(node) == path and node.root().salt == salt
            for each in node.path():
                if each.copies[Tier.DEVICE] is None:
                    self.put(each, Tier.DEVICE, self.dice.random() < 0.5)
            self.held[salt] |= dict.fromkeys(path[: i + 1] for i in range(len(path)))

    def put(self, node: Node, tier: int, point: bool) -> None:
        self.tree.put(node, tier, Fake(path_of(node), node.start, point, self.opened))
        if point:
            self.points.add((tier, node.root().salt, path_of(node)))

    def copy(self) -> None:
        node, tier = self.any(), self.dice.choice([Tier.HOST, Tier.DISK])
        if node is not None and node.copies[tier] is None:
            self.put(node, tier, self.dice.random() < 0.5)

    def split(self) -> None:
        node = self.any()
        if node is not None and len(node.symbols) > 1:
            at = self.dice.randint(node.start + 1, node.end - 1)
            left = self.tree.split(node, at)
            assert (left.end, node.start, node.parent) == (at, at, left)
            assert (left.pins, left.uses) == (node.pins, node.uses)

    def merge(self) -> None:
        node = self.any()
        if node is not None and self.tree.can_merge(node):
            assert not node.pins and len(node.children) == 1
            self.points -= {(tier, node.root().salt, path_of(node)) for tier in Tier}
            start, (child,) = node.start, node.children.values()
            assert self.tree.merge(node) is child
            assert child.start == start and node.parent is None

    def drop(self) -> None:
        """A copy goes, but not from the device before what follows it there, and not the last one."""
        node, tier = self.any(), self.dice.choice(list(Tier))
        if node is None or node.copies[tier] is None or (tier == Tier.DEVICE and not node.is_leaf(tier)):
            return
        if sum(copy is not None for copy in node.copies) > 1:
            node.copies[tier].close()
            self.tree.put(node, tier, None)
            self.points.discard((tier, node.root().salt, path_of(node)))

    def point(self) -> None:
        """A resume point comes or goes."""
        node, tier = self.any(), self.dice.choice(list(Tier))
        if node is None or (copy := node.copies[tier]) is None:
            return
        key = tier, node.root().salt, path_of(node)
        if copy.resumes:
            self.tree.put(node, tier, copy.without_point())
            self.points.remove(key)
        else:
            self.tree.put(node, tier, copy.with_point(Fake(key[2], node.start, True, self.opened)))
            self.points.add(key)

    def remove(self) -> None:
        node = self.any()
        if node is not None and not node.children and not node.pins:
            salt, path, start = node.root().salt, path_of(node), node.start
            self.points -= {(tier, salt, path) for tier in Tier}
            for end in range(start + 1, len(path) + 1):
                del self.held[salt][path[:end]]
            self.tree.remove(node)

    def pin(self) -> None:
        if (node := self.any()) is not None:
            self.tree.pin(node)
            self.pins.append(node)

    def unpin(self) -> None:
        if self.pins:
            self.tree.unpin(self.pins.pop(self.dice.randrange(len(self.pins))))

    def look(self) -> None:
        """A match finds what the dictionary says, and changes nothing."""
        (salt, path), before = self.some(), _print(self.tree)
        walk = self.tree.match(salt, path)
        assert _print(self.tree) == before
        longest = max((n for n in range(len(path) + 1) if not n or path[:n] in self.held[salt]), default=0)
        assert walk.matched == longest
        assert walk.matched == 0 or path_of(walk.nodes[-1])[: walk.matched] == path[: walk.matched]
        assert [node.end for node in walk.nodes[:-1]] == [node.start for node in walk.nodes[1:]]
        assert walk.ends_inside == (bool(walk.nodes) and walk.nodes[-1].end > walk.matched)
        assert all(node.root().salt == salt for node in walk.nodes)
        assert self.tree.match(b"nobody", path).nodes == []

    def check(self) -> None:
        self.tree.check()
        held: dict[bytes, dict[Path, None]] = {b"a": {}, b"b": {}}
        points, copies, pins = set(), set(), dict.fromkeys(self.tree.walk(), 0)
        for node in self.tree.walk():
            salt, path = node.root().salt, path_of(node)
            held[salt] |= dict.fromkeys(path[: i + 1] for i in range(node.start, node.end))
            for tier, copy in enumerate(node.copies):
                if copy is not None:
                    assert (copy.path, copy.start) == (path, node.start)
                    copies.add(copy)
                    points |= {(tier, salt, path)} if copy.resumes else set()
        for node in self.pins:
            for each in node.path():
                pins[each] += 1
        assert {node: node.pins for node in self.tree.walk()} == pins
        assert held == self.held and points == self.points and copies == self.opened
        assert self.tree.roots.keys() == {salt for salt, paths in held.items() if paths}
        assert self.watcher.nodes == {node: _facts(node) for node in self.tree.walk()}, "the watcher was not told"


def path_of(node: Node) -> Path:
    return tuple(int(symbol) for each in node.path() for symbol in each.symbols)


def run(seeds: range, steps: int) -> None:
    for seed in seeds:
        walk = Walk(seed)
        for _ in range(steps):
            walk.step()


def test_walk():
    run(range(20), steps=150)


@pytest.mark.long
def test_long_walk():
    run(range(100, 400), steps=600)


def test_common():
    dice = Random(0)
    for _ in range(300):
        a, b = ([dice.randrange(2) for _ in range(dice.randrange(6))] for _ in range(2))
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common(np.array(a, np.int32), np.array(b, np.int32)) == same


class Counted(np.ndarray):
    """An edge that tells when it is compared."""

    compared: list[int] = []  # noqa: RUF012 (all of them tell here)

    def tobytes(self):
        self.compared.append(len(self))
        return super().tobytes()


@pytest.mark.parametrize(("further", "matched"), [((1, 2, 9), 4), ((1, 9, 9), 3), ((), 2)])
def test_a_match_costs_what_the_prompt_is_long(further, matched):
    """However many siblings there are, a match compares the prompt once."""
    tree, opened = Tree(), set()
    for first in range(2000):
        node = tree.grow(b"", (7, first, 1, 2), now=0.0)
        for each in node.path():
            if each.best == NOWHERE:
                tree.put(each, Tier.DISK, Fake(path_of(each), each.start, False, opened))
    for node in tree.walk():
        node.symbols = node.symbols.view(Counted)
    Counted.compared.clear()
    assert tree.match(b"", (7, 1234, *further)).matched == matched
    assert sum(Counted.compared) == 4


def test_wrong_use_is_caught():
    tree, opened = Tree(), set()
    node = tree.grow(b"", (1, 2, 3), now=0.0)
    tree.put(node, Tier.DEVICE, Fake((1, 2, 3), 0, True, opened))
    tree.pin(node)
    for wrong in (lambda: tree.remove(node), lambda: tree.split(node, 3), lambda: tree.merge(node)):
        with pytest.raises(AssertionError):
            wrong()
    tree.unpin(node)
    with pytest.raises(AssertionError, match="not pinned"):
        tree.unpin(node)
    tree.remove(node)
    assert not tree.roots and not opened and tree.size == 0
