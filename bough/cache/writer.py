"""Writing behind: what the disk lacks is written when it may be, oldest first, and paths from their start.

Nothing waits for it. Bytes are gathered at once and handed over when the device has delivered them; what became of the
node meanwhile is looked at when the file is there. A node whose memory is needed before it was written is lost.
"""

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bough.cache.extent import Extent
from bough.cache.shelf import Shelf, Staged, meta_of, shapes_of
from bough.cache.tree import Node, Symbols, Tier
from bough.state.snapshot import Snapshot

if TYPE_CHECKING:
    from bough.cache.tiers import Tiers

FLUSHED = 16  # nodes written at a time, beside which there are copies of them


class Writer:
    """What is to be written, and what is on its way."""

    def __init__(self, tiers: "Tiers", shelf: Shelf) -> None:
        self.tiers, self.shelf = tiers, shelf
        self._unwritten: OrderedDict[Node, None] = OrderedDict()  # in order of arrival
        self._writing: set[Node] = set()
        self._staged: list[tuple[Node, Staged]] = []

    @property
    def busy(self) -> bool:
        return bool(self._writing or self._unwritten)

    def note(self, node: Node) -> None:
        """The node has something that the disk may lack."""
        self._unwritten.setdefault(node)

    def forget(self, node: Node) -> None:
        """The node is gone."""
        self._unwritten.pop(node, None)

    def write_some(self) -> None:
        """Hand the disk what is to be written, as fast as it may be."""
        self._submit_staged(paced=True)
        while self._unwritten and self.shelf.disk.ready() and self._write_next(paced=True):
            pass

    def _first(self, node: Node) -> None:
        """Not now, but before all others."""
        self._unwritten[node] = None
        self._unwritten.move_to_end(node, last=False)

    def flush(self) -> None:
        """Write all there is to write, however long it takes. A disk that takes nothing is not asked again."""
        before = -1
        self.tiers.lane.wait()
        while (written := self.tiers.ledger.counters["nodes_written_to_disk"]) > before:
            before = written
            while len(self._writing) < FLUSHED and self._write_next(paced=False):
                pass
            for _, staged in self._staged:
                staged.wait()
            self._submit_staged(paced=False)
            self.shelf.disk.drain()
            self.tiers.take_news()

    def _write_next(self, *, paced: bool) -> bool:
        """Stage the oldest node that is not on disk, the path before it first. False: nothing can be done now."""
        for node in self._unwritten:
            path = [each for each in node.path() if self._lacks(each)]
            if not path:
                del self._unwritten[node]
                return True
            if path[0] in self._writing:
                continue
            del self._unwritten[node]
            staged = self._stage(path[0], paced=paced)
            if path[0] is not node and staged is not None:
                self._unwritten[node] = None
            return staged is not False
        return False

    def _lacks(self, node: Node) -> bool:
        """Whether the disk has less of a node than memory has."""
        disk = node.copies[Tier.DISK]
        return disk is None or (disk.is_sound and not disk.resumes and node.resumes)

    def _stage(self, node: Node, *, paced: bool) -> bool | None:
        """Hand a node to the disk. False: not now; None: not at all, nor what follows it."""
        memory = [c for c in node.copies[: Tier.DISK] if isinstance(c, Snapshot)]
        if not memory:
            return None
        source = next((c for c in memory if c.resumes), memory[0])
        if source.pool is self.tiers.host and not self.tiers.lane.idle:
            self._first(node)
            return False  # its bytes may still be on their way
        edge = node.copies[Tier.DISK] is None
        arrays = shapes_of(source, edge=edge, point=source.resumes)
        size = self.shelf.disk.size_of(node.start if edge else node.end, node.end, arrays, meta_of(source))
        self.tiers.tree.pin(node)  # what makes room for it is something else
        while (short := self.shelf.disk.free_bytes < size) and size <= self.shelf.disk.nbytes:
            if not self.tiers.evict(Tier.DISK):
                break
        self.tiers.tree.unpin(node)
        if short:
            self.tiers.ledger.count("nodes_too_large_for_disk")
            return None
        if paced and not self.shelf.disk.room_for(size):
            self._first(node)
            return False
        self._writing.add(node)
        self.tiers.lane.fence()
        self._staged.append((node, Staged(source, edge=edge, point=source.resumes)))
        self._submit_staged(paced=paced)
        return True

    def _submit_staged(self, *, paced: bool) -> None:
        waiting = []
        for node, staged in self._staged:
            if not staged.ready:
                waiting.append((node, staged))
                continue
            if node.parent is None or node.end != staged.end:  # it went, or grew into another
                self._writing.discard(node)
                continue
            piece = staged.piece(node.root().salt, _tokens(node))
            if not self.shelf.disk.write(piece, partial(self.tiers.post, self._wrote, node, staged), paced=paced):
                self._writing.discard(node)
                self.note(node)
        self._staged = waiting

    def _wrote(self, node: Node, staged: Staged, extent: Extent | None) -> None:
        self._writing.discard(node)
        if extent is None:
            self.tiers.ledger.count("writes_failed")
            if node.parent is not None:
                self.note(node)
            return
        copy = self.shelf.copy_of(extent)
        if node.parent is None or node.end != staged.end or (not copy.parts and node.copies[Tier.DISK] is None):
            copy.close()
            return
        self.tiers.attach(node, Tier.DISK, copy, staged.start)
        self.tiers.ledger.count("nodes_written_to_disk")
        if self._lacks(node):
            self.note(node)


def _tokens(node: Node) -> Symbols:
    return np.concatenate([each.symbols for each in node.path()])
