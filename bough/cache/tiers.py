"""The tiers under the tree: room is made, copies move down and up, and what is new is written behind.

Device and host are pools; the disk is a shelf of extents. Only the thread that owns the tree calls in here. The disk's
thread posts what it has done into a queue, and `settle` takes it from there. Nothing waits for the disk: a node whose
memory is needed before it was written is lost, and that is counted.
"""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from bough.cache.extent import Extent, Lost, Rows, connect
from bough.cache.ledger import Ledger
from bough.cache.policy import Index, Move
from bough.cache.shelf import DiskCopy, Shelf
from bough.cache.tree import NOWHERE, Copy, Node, Tier, Tree
from bough.cache.writer import Writer
from bough.state.lane import Lane
from bough.state.pool import Pool
from bough.state.snapshot import Snapshot


@dataclass(slots=True, eq=False)
class Load:
    """A copy on its way from disk to the device."""

    node: Node
    copy: DiskCopy  # held until it is done, so that no file goes meanwhile
    start: int
    end: int
    edge: bool
    point: bool
    missing: int = 0  # extents not read yet
    data: dict[Extent, dict[str, Rows]] = field(default_factory=dict)
    done: bool = False
    failed: bool = False


class Tiers:
    """Everything that moves between device, host and disk."""

    def __init__(
        self,
        tree: Tree,
        index: Index,
        ledger: Ledger,
        device: Pool,
        host: Pool | None,
        shelf: Shelf | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tree, self.index, self.ledger, self.clock = tree, index, ledger, clock
        self.device, self.host, self.shelf = device, host, shelf
        self.neighbour: Tiers | None = None  # that of another model's states in the same arena
        self.lane = Lane(device.device)
        self.evicted = 0  # copies and resume points that had to make room
        self.wake: Callable[[], None] = lambda: None  # called by the disk's thread when there is news
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loads: dict[Node, Load] = {}
        self.writer = Writer(self, shelf) if shelf is not None else None
        if shelf is not None:
            self._recover(shelf)

    # Room.

    def make_room(self, needs: list[int], *, spare: bool = False, tier: Tier = Tier.DEVICE) -> bool:
        """Evict until a pool can lend these; False if it cannot."""
        pool = self.device if tier == Tier.DEVICE else self.host
        assert pool is not None
        while not pool.fits(needs, spare=spare):
            if not any(tiers.evict(tier) for tiers in self._fullest_first(tier)):
                return False
            self.evicted += 1
        if pool.slabs_for(needs, spare=spare) > pool.free_slabs:
            self.lane.wait()  # what is being copied is not to be moved
            pool.compact(needs, spare=spare)
        self.lane.fence()  # whoever writes to what was freed comes after the copies of it
        return True

    def _fullest_first(self, tier: Tier) -> "list[Tiers]":
        """Itself and the one it shares an arena with, that which holds more tokens first."""
        if self.neighbour is None:
            return [self]
        return sorted((self, self.neighbour), key=lambda tiers: -tiers._tokens_held(tier))

    def _tokens_held(self, tier: Tier) -> float:
        pool = self.device if tier == Tier.DEVICE else self.host
        if pool is None:
            return 0.0
        stores = [pool.stores[i] for i in pool.page_stores if pool.stores[i].unit.reach is None]
        return max((store.used for store in stores), default=pool.used_bytes)

    def evict(self, tier: Tier) -> bool:
        """Give up what is worth least on a tier; False if nothing there can go."""
        now = self.clock()
        chosen = self.index.least(tier, now, partial(self._frees, tier))
        if chosen is None:  # a leaf whose pages others share too may stand before one that would free some
            chosen = self.index.least(tier, now, partial(self._can_go, tier))
        if chosen is None:
            return False
        node, move = chosen
        self.ledger.count(f"{move.name.lower()}s_evicted_from_{tier.name.lower()}")
        if tier == Tier.DEVICE and self.host is not None:
            self._to_host(node)
        if move is Move.POINT:
            self.drop_point(node, tier)
        else:
            self.drop(node, tier)
        return True

    def _can_go(self, tier: Tier, node: Node, move: Move) -> bool:
        return move is Move.LEAF and node.copies[tier] is not None and node.is_leaf(tier) and not node.pins

    def _frees(self, tier: Tier, node: Node, move: Move) -> bool:
        copy = node.copies[tier]
        if copy is None or node.pins:
            return False
        if move is Move.LEAF:
            return node.is_leaf(tier) and copy.freed_bytes > 0
        return copy.resumes and _point_frees(copy)

    def drop_point(self, node: Node, tier: Tier) -> None:
        """Take the resume point off a copy; a node that is neither fork nor resume point is joined with the next."""
        copy = node.copies[tier]
        assert copy is not None
        self.tree.put(node, tier, copy.without_point())
        if not node.resumes:
            self.ledger.bury(node, tier, "resume point", self.clock())
            if self.tree.can_merge(node):
                self._forget(node)
                self.tree.merge(node)

    def drop(self, node: Node, tier: Tier) -> None:
        """Take a copy away; a node that nothing is left of goes, with all below it."""
        copy = node.copies[tier]
        assert copy is not None
        copy.close()
        self.tree.put(node, tier, None)
        if node.best == NOWHERE:
            if tier < Tier.DISK and self.shelf is not None:
                self.ledger.count("nodes_lost_before_they_were_written")
            self.remove(node, tier)

    def remove(self, node: Node, tier: Tier) -> None:
        """Take a node and all below it out of the tree."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        for each in reversed(below):
            self.ledger.bury(each, tier, "node", self.clock())
            self._forget(each)
            self.tree.remove(each)

    def _forget(self, node: Node) -> None:
        if self.writer is not None:
            self.writer.forget(node)

    def _to_host(self, node: Node) -> None:
        """Copy what is on the device to the host, unless a slower tier has as much."""
        copy = node.copies[Tier.DEVICE]
        assert isinstance(copy, Snapshot) and self.host is not None
        if any(c is not None and c.is_sound and c.resumes >= copy.resumes for c in node.copies[Tier.HOST :]):
            return
        if (old := node.copies[Tier.HOST]) is not None:
            old.close()
            self.tree.put(node, Tier.HOST, None)
        if self.make_room(copy.sizes(), spare=True, tier=Tier.HOST):
            with self.lane.copying():
                self.tree.put(node, Tier.HOST, copy.copy_to(self.host))
            self.ledger.count("nodes_demoted_to_host")

    # Up.

    def promote(self, node: Node, *, point: bool) -> "Load | bool":
        """Bring a node's edge to the device, and its resume point if wanted. True: it is there; False: it cannot be.

        A Load is one that is being read from disk, or one before it that is: then it can be had when that is done.
        """
        have = node.copies[Tier.DEVICE]
        edge, point = have is None, point and not (have is not None and have.resumes)
        if not edge and not point:
            return True
        if load := self._loads.get(node):
            return load if load.edge >= edge and load.point >= point else False
        host = node.copies[Tier.HOST]
        if isinstance(host, Snapshot) and (host.resumes or not point):
            if before := next((each for each in node.path() if each in self._loads), None):
                return self._loads[before]  # nothing is on the device before what it follows
            if not self.make_room(host.sizes(edge=edge, point=point), spare=True):
                return False
            with self.lane.copying():
                self.give(node, Tier.DEVICE, host.copy_to(self.device, edge=edge, point=point))
            self.ledger.count("nodes_promoted_from_host")
            return True
        disk = node.copies[Tier.DISK]
        if not isinstance(disk, DiskCopy) or not disk.is_sound or (point and not disk.resumes):
            return False
        return self._load(node, disk, edge=edge, point=point)

    def _load(self, node: Node, disk: DiskCopy, *, edge: bool, point: bool) -> "Load | bool":
        if not self.make_room(disk.sizes(self.device, node.start, node.end, edge=edge, point=point), spare=True):
            return False
        assert self.shelf is not None
        wanted = disk.wanted(edge=edge, point=point)
        load = Load(node, disk.clone(), node.start, node.end, edge, point, missing=len(wanted))
        self._loads[node] = load
        for extent, rows in wanted.items():
            self.shelf.disk.read(extent, rows, partial(self.post, self._loaded, load, extent))
        if not wanted:  # where every reach ends somewhere, an edge has nothing of its own
            self.post(self._finish_loads)
        return load

    def _loaded(self, load: Load, extent: Extent, rows: dict[str, Rows] | Lost) -> None:
        assert self.shelf is not None
        load.missing -= 1
        if isinstance(rows, Lost):
            load.failed = True
            self.shelf.lost.add(extent)
            self.ledger.count(f"extents_found_{rows}")
        else:
            load.data[extent] = rows
            self.shelf.disk.touch(extent)
        self._finish_loads()

    def _finish_loads(self) -> None:
        """Hand over what is read, a path from its beginning."""
        read = [each for each in self._loads.values() if not each.missing]
        for each in sorted(read, key=lambda each: each.end):
            if not any(node in self._loads for node in each.node.path()[:-1]):
                self._finish(each)

    def _finish(self, load: Load) -> None:
        del self._loads[load.node]
        load.done = True
        edge, point = load.edge, load.point
        needs = load.copy.sizes(self.device, load.start, load.end, edge=edge, point=point)
        # Asked again, since the path to it may have had to make room, if nobody waits for it any more.
        if not load.failed and _is_reached(load) and self.make_room(needs, spare=True) and _is_reached(load):
            made = load.copy.filled(self.device, load.start, load.end, load.data, edge=edge, point=point)
            self.attach(load.node, Tier.DEVICE, made, made.start)
            self.ledger.count("nodes_promoted_from_disk")
        else:
            load.failed = True
        load.data = {}
        load.copy.close()

    def give(self, node: Node, tier: Tier, copy: Copy) -> None:
        """Let the node have a copy, or of it what it lacks."""
        have = node.copies[tier]
        if have is None:
            self.tree.put(node, tier, copy)
        elif copy.resumes and not have.resumes:
            self.tree.put(node, tier, have.with_point(copy))
        else:
            copy.close()

    def attach(self, node: Node, tier: Tier, copy: Copy, start: int) -> None:
        """Give a copy of [start, the node's end) to the node and those before it that it covers.

        The edge it was made of may have been split meanwhile. What belongs to no whole edge is dropped.
        """
        if start == node.end:  # a resume point alone
            if node.copies[tier] is None:
                copy.close()
            else:
                self.give(node, tier, copy)
            return
        pieces: list[tuple[Node, Copy]] = []
        rest: Copy | None = copy
        while rest is not None and node.start > start and node.parent is not None:
            rest, right = rest.split(node.start)
            assert right is not None
            pieces.append((node, right))
            node = node.parent
        if rest is not None and node.start == start:
            pieces.append((node, rest))
        elif rest is not None:
            rest.close()
        for owner, piece in reversed(pieces):
            self.give(owner, tier, piece)

    # The disk.

    def note(self, node: Node) -> None:
        """The node has something that the disk may lack."""
        if self.writer is not None:
            self.writer.note(node)

    def settle(self) -> None:
        """Take in what the disk has done, and hand it what is to be written, as fast as it may be; let time pass."""
        for each in filter(None, (self, self.neighbour)):
            each.index.advance(each.clock())
        self.take_news()
        if self.shelf is not None and self.shelf.lost:
            self._purge()
        if self.writer is not None:
            self.writer.write_some()

    def take_news(self) -> None:
        while not self._news.empty():
            self._news.get()()

    @property
    def busy(self) -> bool:
        """Whether something is being read or written that `settle` should be called for."""
        return bool(self._loads) or (self.writer is not None and self.writer.busy)

    def flush(self) -> None:
        """Write all there is to write, however long it takes."""
        if self.writer is not None:
            self.writer.flush()

    def post(self, what: Callable[..., None], *args: object) -> None:
        """Let the thread that owns the tree do this when it settles; called by the disk's."""
        self._news.put(partial(what, *args))
        self.wake()

    # After a restart, and after damage.

    def _recover(self, shelf: Shelf) -> None:
        """Hang what the disk has into the tree."""
        self.index.advance(self.clock())  # ages count from now
        found, stranded = connect(shelf.disk.extents)
        for extent, path in found:
            shelf.hold(extent)  # until the tree has what it wants of it
            node = self.tree.grow(extent.salt, path, extent.used)
            self.attach(node, Tier.DISK, shelf.copy_of(extent), extent.start)
            for each in node.path():
                each.used = max(each.used, extent.used)
            shelf.drop(extent)
        for extent in stranded:
            shelf.disk.delete(extent)
        self.ledger.count("stranded_extents_dropped", len(stranded))
        while shelf.disk.free_bytes < 0 and self.evict(Tier.DISK):
            pass

    def _purge(self) -> None:
        """Drop copies on disk that turned out to be damaged. Pinned nodes come later."""
        for node, copy in list(self._disk_copies()):
            if node.parent is not None and not copy.is_sound and not node.pins:
                self.drop(node, Tier.DISK)
                if node.parent is not None:
                    self.note(node)

    def _disk_copies(self) -> Iterator[tuple[Node, DiskCopy]]:
        for node in self.tree.walk():
            if isinstance(copy := node.copies[Tier.DISK], DiskCopy):
                yield node, copy

    def check(self) -> None:
        self.tree.check()
        self.index.check(self.tree.walk())
        if self.host is not None:
            self.host.check()
        if self.shelf is not None:
            loading = [load.copy for load in self._loads.values()]
            self.shelf.check([*loading, *(copy for _, copy in self._disk_copies())])


def _is_reached(load: Load) -> bool:
    """Whether what is read can be used: its node is still there, perhaps in parts, and the device has all before it."""
    node = load.node
    while node.start > load.start and node.parent is not None:
        node = node.parent
    if node.parent is None or node.start != load.start:
        return False
    return node.parent.parent is None or node.parent.copies[Tier.DEVICE] is not None


def _point_frees(copy: Copy) -> bool:
    if isinstance(copy, DiskCopy):
        return copy.point is not None and all(part.extent is not copy.point for part in copy.parts)
    assert isinstance(copy, Snapshot)
    pool = copy.pool
    if copy.slot is not None:
        return pool.slot_refs(copy.slot) == 1
    windows = [(i, run) for i, run in copy.runs.items() if pool.stores[i].unit.reach is not None]
    return any((pool.stores[i].refs[run.ids] == 1).any() for i, run in windows)
