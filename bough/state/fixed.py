"""Fixed: the numbers of a step at addresses that stay, so that work captured over them can be done again with others.

It holds up to so many rows and tokens. Rows that are not there have no tokens; tokens that are not there belong to no
row, and their entries go to scratch. All numbers lie in one buffer, with the pages of all rows last, so that one copy
sends what is used of it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bough.ops.ragged import Owed, Rows, ShortRows, Spans
from bough.ops.spans import FEW, divided, most_spans, programs
from bough.state.kinds import PageKind
from bough.state.pool import Pool
from bough.state.recordings import NONE, PLACE, Place, Recordings
from bough.state.step import HostNumbers, PageTable, Step

Values = Sequence[int] | NDArray[np.int64]

PER_ROW = ("start", "tokens", "history", "read", "write", *PLACE)
PER_TOKEN = ("token", "position", "place")


class _Unsent(NamedTuple):
    """Room for numbers that are yet to be sent, and the views of it: to make these takes longer than to copy it."""

    buffer: Tensor
    target: Tensor  # where it goes on the device
    packed: NDArray[np.int32]  # the buffer
    by_row: NDArray[np.int32]  # [.., rows]: its beginning


class Fixed:
    """Room for the numbers of `rows` rows of up to `each` tokens, of a context each."""

    def __init__(self, pool: Pool, rows: int, each: int, context: int) -> None:
        self.pool, self.rows, self.each = pool, rows, each
        self._windows = {unit: _window(pool, unit) for unit in pool.page_stores}
        self._programs = {unit: programs(pool.device, _kv_heads(pool, unit), rows) for unit in pool.page_stores}
        self._at: dict[str, slice] = {}
        self._end = 0
        for name, size in self._sizes():
            self._at[name] = slice(self._end, self._end + size)
            self._end += -(-size // 4) * 4  # 16 bytes
        pages = len(pool.page_stores) * rows * (-(-(context + FEW) // pool.layout.page_tokens) + 1)  # drafts go past it
        self._blank = self._without_rows()
        with torch.inference_mode(mode=False):  # or they could be written in that mode alone
            self._numbers = torch.zeros(self._end + pages, dtype=torch.int32, device=pool.device)
        self._numbers[: self._end] = torch.from_numpy(self._blank)
        self._used = self._end  # numbers that the last step had
        self._unsent: _Unsent | None = None
        self.tokens, self.positions = self._view("token"), self._view("position")
        self.short = ShortRows(*(self._view(name) for name in ("start", "tokens", "read", "write")))

    def _sizes(self) -> Iterable[tuple[str, int]]:
        yield from ((name, self.rows) for name in PER_ROW)
        for unit in self.pool.page_stores:
            yield from ((f"{name} {unit}", self.rows) for name in ("offset", "first", "used"))
        yield from ((name, self.rows * self.each) for name in PER_TOKEN)
        for unit in self.pool.page_stores:
            yield f"page {unit}", self.rows * self.each
            yield f"row {unit}", most_spans(self.rows, self._programs[unit])

    def _without_rows(self) -> NDArray[np.int32]:
        blank = np.zeros(self._end, np.int32)
        rows = (f"row {unit}" for unit in self.pool.page_stores)
        for name in ("read", "write", "keep", "late_keep", *rows):
            blank[self._at[name]] = NONE
        for unit in self.pool.page_stores:
            blank[self._at[f"page {unit}"]] = self.pool.stores[unit].scratch
        return blank

    def _view(self, name: str) -> Tensor:
        return self._numbers[self._at[name]]

    def owed(self, late: bool) -> Owed:
        of_parts = ("late_owed", "late_keep") if late else ("owed", "keep")
        return Owed(*map(self._view, ("owed_start", *of_parts, "record")))

    def table(self, unit: int) -> PageTable:
        own = {name: self._view(f"{name} {unit}") for name in ("offset", "first", "used", "row")}
        shared = {name: self._view(name) for name in ("start", "tokens", "history")}
        pages, unknown = self._numbers[self._end :], (0,) * self.rows
        return PageTable(pages, unknown, self._view(f"page {unit}"), self._view("place"), Spans(**own, **shared))

    def step(self, recordings: Recordings | None = None) -> Step:
        """A step over whatever numbers there are. To ops its rows are all there and of full length."""
        rows, slots = Rows((self.each,) * self.rows, (1,) * self.rows), (0,) * self.rows
        if self.pool.slot_store is None:
            return Step(self.pool, rows, self)
        recorded = (recordings is not None,) * self.rows
        return Step(self.pool, rows, self, slots, slots, recorded=recorded, recordings=recordings)

    def fill(self, step: Step, places: Sequence[Place] = ()) -> None:
        """Take over the numbers of a step of no more rows and tokens, and their places where these are recorded.

        Nobody waits for them to be sent.
        """
        assert isinstance(step.numbers, HostNumbers)
        numbers, rows = step.numbers, step.rows
        tables = [(unit, *numbers.pages(unit)) for unit in self.pool.page_stores]
        self._used = self._end + sum([len(pages) for _, pages, _ in tables])
        unsent, self._unsent = self._unsent, None  # whatever becomes of it
        if unsent is None or len(unsent.packed) < self._used:
            unsent = self._buffer()
        packed, by_row, end = unsent.packed, self._by_row(step, places), self._end

        def put(name: str, values: Values) -> None:
            start = self._at[name].start
            packed[start : start + len(values)] = values

        put("token", numbers.fed)
        put("position", numbers.places)
        put("place", numbers.in_page)
        for unit, pages, offset in tables:
            parts = divided(rows.counts, rows.history, self._windows[unit], self._programs[unit])
            shift = end - self._end
            by_row += [[at + shift for at in offset], [0, *accumulate(parts.used[:-1])], parts.used]
            put(f"page {unit}", numbers.written(unit))
            put(f"row {unit}", parts.row)
            packed[end : end + len(pages)] = pages
            end += len(pages)
        unsent.by_row[:, : len(rows.counts)] = by_row
        unsent.target.copy_(unsent.buffer, non_blocking=True)
        if step.given is not None:
            self.tokens[: rows.total].copy_(step.given)

    def make_ready(self) -> None:
        """Have a buffer for the next numbers, while the device is at work on those that were sent."""
        self._unsent = self._buffer()

    def _buffer(self) -> _Unsent:
        """One for the pages that were used last, and one more of each row."""
        size = min(self._used + len(self.pool.page_stores) * self.rows, len(self._numbers))
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=self.pool.device.type == "cuda")
        packed = buffer.numpy()
        packed[: self._end] = self._blank
        by_row = packed[: self._at["token"].start].reshape(-1, self._at[PER_ROW[1]].start)
        return _Unsent(buffer, self._numbers[:size], packed, by_row)

    def _by_row(self, step: Step, places: Sequence[Place]) -> list[Sequence[int]]:
        """What there is of PER_ROW, in that order."""
        counts, history = step.rows.counts, step.rows.history
        none = (NONE,) * len(counts)
        read, write = step.read or none, step.write or none
        if 0 in history:
            read = tuple([slot if before else NONE for slot, before in zip(read, history, strict=True)])
        if any(step.recorded):
            write = tuple([NONE if kept else slot for slot, kept in zip(write, step.recorded, strict=True)])
        by_place = zip(*places, strict=True) if places else ([blank] * len(counts) for blank in PLACE.values())
        return [[0, *accumulate(counts[:-1])], counts, history, read, write, *by_place]


def _window(pool: Pool, unit: int) -> int | None:
    reach = pool.stores[unit].unit.reach
    return None if reach is None else reach + 1


def _kv_heads(pool: Pool, unit: int) -> int:
    """Of the group's first layer."""
    kind = pool.layout.kinds[next(layer for layer, _ in pool.stores[unit].unit.fields)]
    assert isinstance(kind, PageKind)
    return kind.heads
