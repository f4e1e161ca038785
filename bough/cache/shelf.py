"""What lies on the disk tier, and how copies become bytes and bytes copies again.

On the device and on the host a copy is a Snapshot in that tier's pool. On disk it is a list of references into extents:
splitting an edge shares the files, and the last reference deletes one. An extent written for a resume point alone has
no tokens of its own.

Knows pools and extents; decides nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bough.cache.disk import Disk
from bough.cache.extent import Extent, PathDigest, Piece, Rows
from bough.cache.tree import Symbols
from bough.state.layout import Layout
from bough.state.pool import Pool
from bough.state.snapshot import Snapshot, vacant
from bough.state.store import Ids, Store


class Shelf:
    """The extents that copies refer to."""

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self.disk, self.layout = disk, layout
        self.references: Counter[Extent] = Counter()
        self.lost: set[Extent] = set()  # found to be damaged; copies that refer to them are no good
        self.full = tuple(i for i, unit in enumerate(layout.units) if unit.is_page and unit.reach is None)
        self.has_points = len(self.full) < len(layout.units)

    def hold(self, extent: Extent) -> None:
        self.references[extent] += 1

    def drop(self, extent: Extent) -> None:
        self.references[extent] -= 1
        if not self.references[extent]:
            del self.references[extent]
            if extent not in self.lost:
                self.disk.delete(extent)
            self.lost.discard(extent)

    def has_point(self, extent: Extent) -> bool:
        """Whether it holds every window and the slot, so that its end can be resumed at."""
        units = range(len(self.layout.units))
        return self.has_points and all(f"unit{i}" in extent.arrays for i in units if i not in self.full)

    def copy_of(self, extent: Extent) -> "DiskCopy":
        """All that an extent has."""
        parts = [Part(extent, extent.start, extent.end)] if extent.start < extent.end else []
        return DiskCopy(self, parts, extent if self.has_point(extent) else None)

    def check(self, copies: "Sequence[DiskCopy]") -> None:
        """Assert that references are what these copies hold, and that the disk has just what is referred to."""
        held = Counter(extent for copy in copies for extent in copy.extents())
        assert held == self.references, f"extents are referred to {held - self.references} times too few"


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, end) of an edge, as an extent has them."""

    extent: Extent
    start: int
    end: int


class DiskCopy:
    """What the disk holds of an edge: parts that follow each other, and the extent with the resume point at its end."""

    def __init__(self, shelf: Shelf, parts: Sequence[Part], point: Extent | None) -> None:
        self.shelf, self.parts, self.point = shelf, tuple(parts), point
        for extent in self.extents():
            shelf.hold(extent)

    def extents(self) -> list[Extent]:
        """Each as often as it is referred to."""
        return [part.extent for part in self.parts] + ([] if self.point is None else [self.point])

    @property
    def resumes(self) -> bool:
        return self.is_sound and (self.point is not None or not self.shelf.has_points)

    @property
    def is_sound(self) -> bool:
        return self.shelf.lost.isdisjoint(self.extents())

    @property
    def freed_bytes(self) -> int:
        """Bytes of the files that closing it would delete."""
        mine = Counter(self.extents())
        return sum(extent.nbytes for extent, count in mine.items() if self.shelf.references[extent] == count)

    def split(self, at: int) -> "tuple[DiskCopy | None, DiskCopy | None]":
        left = [Part(each.extent, each.start, min(each.end, at)) for each in self.parts if each.start < at]
        right = [Part(each.extent, max(each.start, at), each.end) for each in self.parts if each.end > at]
        halves = DiskCopy(self.shelf, left, None), DiskCopy(self.shelf, right, self.point)
        self.close()
        return halves

    def join(self, right: "DiskCopy") -> "DiskCopy":
        *before, last = self.parts
        first, *after = right.parts
        if last.extent is first.extent:  # the edge was split before: each extent is one part of a copy
            border = [Part(last.extent, last.start, first.end)]
        else:
            border = [last, first]
        joined = DiskCopy(self.shelf, [*before, *border, *after], right.point)
        self.close()
        right.close()
        return joined

    def with_point(self, other: "DiskCopy") -> "DiskCopy":
        """This edge with the resume point of another copy that ends there; takes both over."""
        whole = DiskCopy(self.shelf, self.parts, other.point)
        self.close()
        other.close()
        return whole

    def clone(self) -> "DiskCopy":
        return DiskCopy(self.shelf, self.parts, self.point)

    def without_point(self) -> "DiskCopy":
        bare = DiskCopy(self.shelf, self.parts, None)
        self.close()
        return bare

    def close(self) -> None:
        for extent in self.extents():
            self.shelf.drop(extent)
        self.parts, self.point = (), None

    def wanted(self, *, edge: bool, point: bool) -> dict[Extent, dict[str, tuple[int, int]]]:
        """Which rows of which extents it takes to bring it back."""
        rows: dict[Extent, dict[str, tuple[int, int]]] = {}
        for part in self.parts if edge else ():
            assert part.extent not in rows, "an extent is twice in a copy"
            first, last = self.shelf.layout.pages(part.start, part.end)
            for unit in self.shelf.full:
                base = part.extent.meta["first"][str(unit)]
                rows.setdefault(part.extent, {})[f"unit{unit}"] = (first - base, last - base)
        if point and self.point is not None:
            for name, (count, _) in self.point.arrays.items():
                if int(name.removeprefix("unit")) not in self.shelf.full:
                    rows.setdefault(self.point, {})[name] = (0, count)
        return rows

    def filled(
        self, pool: Pool, start: int, end: int, data: Mapping[Extent, Mapping[str, Rows]], *, edge: bool, point: bool
    ) -> Snapshot:
        """A snapshot in a pool, of rows that were read. Raises PoolFull, and changes nothing, if there is no room."""
        pages, slot = self._shape(pool, start, end, edge=edge, point=point)
        made = vacant(pool, start if edge else end, end, pages, slot)
        for part in self.parts if edge else ():
            numbers = self.shelf.layout.pages(part.start, part.end)
            for unit in self.shelf.full:
                _write(pool.stores[unit], made.runs[unit].part(*numbers).ids, data[part.extent][f"unit{unit}"])
        if point and self.point is not None:
            for index, ids in made.references():
                if index not in self.shelf.full:
                    _write(pool.stores[index], ids, data[self.point][f"unit{index}"])
        return made

    def sizes(self, pool: Pool, start: int, end: int, *, edge: bool, point: bool) -> list[int]:
        """How many entries of each unit a snapshot of it takes."""
        pages, slot = self._shape(pool, start, end, edge=edge, point=point)
        counts = [pages.get(index, (0, 0))[1] for index in range(len(pool.stores))]
        if slot is not None and pool.slot_store is not None:
            counts[pool.slot_store] = 1
        return counts

    def _shape(
        self, pool: Pool, start: int, end: int, *, edge: bool, point: bool
    ) -> tuple[dict[int, tuple[int, int]], int | None]:
        first, last = self.shelf.layout.pages(start, end)
        pages = dict.fromkeys(self.shelf.full, (first, last - first) if edge else (0, 0))
        slot = None
        for name, (count, _) in self.point.arrays.items() if point and self.point is not None else ():
            unit = int(name.removeprefix("unit"))
            if unit == pool.slot_store:
                slot = 0
            elif unit not in self.shelf.full:
                pages[unit] = (self.point.meta["first"][str(unit)], count)  # type: ignore[union-attr]
        return pages, slot


def _write(store: Store, ids: Ids, rows: Rows) -> None:
    there = torch.from_numpy(ids).to(store.data.device)
    store.data[there, : store.unit.nbytes] = torch.from_numpy(rows).to(store.data.device)


def _references(snapshot: Snapshot, edge: bool, point: bool) -> Iterator[tuple[int, Ids]]:
    """What an extent of it holds: the pages of its edge, those of its windows and its slot, or both."""
    for index, run in snapshot.runs.items():
        if edge if snapshot.pool.stores[index].unit.reach is None else point:
            yield index, run.ids
    if point:
        yield from snapshot.pool.slot_reference(snapshot.slot)


def shapes_of(snapshot: Snapshot, *, edge: bool, point: bool) -> dict[str, tuple[int, int]]:
    """The arrays that an extent of it will have."""
    units = snapshot.pool.layout.units
    return {f"unit{index}": (len(ids), units[index].nbytes) for index, ids in _references(snapshot, edge, point)}


def meta_of(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    """The number of the first page of each group."""
    return {"first": {str(index): run.first for index, run in snapshot.runs.items()}}


class Staged:
    """The bytes of a snapshot on their way to disk: gathered at once, ready when the device has delivered them."""

    def __init__(self, snapshot: Snapshot, *, edge: bool, point: bool) -> None:
        self.start, self.end = snapshot.start if edge else snapshot.end, snapshot.end
        self.meta, pool = meta_of(snapshot), snapshot.pool
        self.tensors = {
            f"unit{index}": self._rows(pool.stores[index], ids) for index, ids in _references(snapshot, edge, point)
        }
        self._event = torch.cuda.Event() if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    @staticmethod
    def _rows(store: Store, ids: Ids) -> torch.Tensor:
        there = torch.from_numpy(ids).to(store.data.device)
        rows = store.data.index_select(0, there)[:, : store.unit.nbytes]
        if rows.device.type == "cuda":
            landing = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
            return landing.copy_(rows, non_blocking=True)
        return rows

    @property
    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def piece(self, salt: bytes, path: Symbols) -> Piece:
        """As an extent is made of it; `path` are the tokens from the root to its end."""
        arrays = {name: np.ascontiguousarray(rows.numpy()) for name, rows in self.tensors.items()}
        before = PathDigest(salt, path[: self.start]).digest()
        return Piece(salt, before, self.start, path[self.start : self.end], arrays, self.meta)
