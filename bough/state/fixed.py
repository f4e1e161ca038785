"""Fixed: the numbers of a step at addresses that stay, so that work captured over them can be done again with others.

It holds up to so many rows and tokens. Rows that are not there have no tokens; tokens that are not there belong to no
row, and their entries go to scratch. All numbers lie in one buffer, with the pages of all rows last, so that one copy
sends what is used of it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bough.ops.ragged import Owed, Rows, ShortRows, Spans
from bough.ops.spans import FEW, divided, most_spans, programs
from bough.state.kinds import PageKind
from bough.state.pool import Pool
from bough.state.recordings import Recordings
from bough.state.step import HostNumbers, PageTable, Step

Values = Sequence[int] | NDArray[np.int64]

NONE = -1
PER_ROW = ("start", "tokens", "history", "read", "write", "owed start", "owed tokens")
PER_TOKEN = ("token", "position", "place")


class Fixed:
    """Room for the numbers of `rows` rows of up to `each` tokens, of a context each."""

    def __init__(self, pool: Pool, rows: int, each: int, context: int) -> None:
        self.pool, self.rows, self.each = pool, rows, each
        self._windows = {unit: _window(pool, unit) for unit in pool.page_stores}
        self._programs = {unit: programs(pool.device, _kv_heads(pool, unit)) for unit in pool.page_stores}
        self._at: dict[str, slice] = {}
        self._end = 0
        for name, size in self._sizes():
            self._at[name] = slice(self._end, self._end + size)
            self._end += -(-size // 4) * 4  # 16 bytes
        pages = len(pool.page_stores) * rows * (-(-(context + FEW) // pool.layout.page_tokens) + 1)  # drafts go past it
        self._blank = self._without_rows()
        self._numbers = torch.zeros(self._end + pages, dtype=torch.int32, device=pool.device)
        self._numbers[: self._end] = torch.from_numpy(self._blank)
        self.tokens, self.positions = self._view("token"), self._view("position")
        self.short = ShortRows(*(self._view(name) for name in ("start", "tokens", "read", "write")))
        self.owed = Owed(*(self._view(name) for name in ("turn", "owed start", "owed tokens")))

    def _sizes(self) -> Iterable[tuple[str, int]]:
        yield from ((name, self.rows) for name in PER_ROW)
        for unit in self.pool.page_stores:
            yield from ((f"{name} {unit}", self.rows) for name in ("offset", "first", "used"))
        yield from ((name, self.rows * self.each) for name in PER_TOKEN)
        yield "turn", 1
        for unit in self.pool.page_stores:
            yield f"page {unit}", self.rows * self.each
            yield f"row {unit}", most_spans(self.rows, self._programs[unit])

    def _without_rows(self) -> NDArray[np.int32]:
        blank = np.zeros(self._end, np.int32)
        for name in ("read", "write", *(f"row {unit}" for unit in self.pool.page_stores)):
            blank[self._at[name]] = NONE
        for unit in self.pool.page_stores:
            blank[self._at[f"page {unit}"]] = self.pool.stores[unit].scratch
        return blank

    def _view(self, name: str) -> Tensor:
        return self._numbers[self._at[name]]

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

    def fill(self, step: Step, turn: int = 0, owed: Sequence[tuple[int, int]] = ()) -> None:
        """Take over the numbers of a step of no more rows and tokens. Nobody waits for them to be sent.

        It records into the half whose `turn` it is, once slots are moved on by what each row owes: so many tokens of
        the other half, from a first one on.
        """
        assert isinstance(step.numbers, HostNumbers)
        numbers, rows = step.numbers, step.rows
        tables = [numbers.pages(unit) for unit in self.pool.page_stores]
        size = self._end + sum([len(pages) for pages, _ in tables])
        sent = torch.empty(size, dtype=torch.int32, pin_memory=self.pool.device.type == "cuda")
        packed = sent.numpy()
        packed[: self._end] = self._blank

        def put(name: str, values: Values) -> None:
            start = self._at[name].start
            packed[start : start + len(values)] = values

        put("token", numbers.fed)
        put("position", numbers.places)
        put("place", numbers.places % self.pool.layout.page_tokens)
        put("turn", [turn])
        by_row, end = self._by_row(step, numbers, owed), self._end
        for unit, (pages, offset) in zip(self.pool.page_stores, tables, strict=True):
            parts = divided(rows.counts, rows.history, self._windows[unit], self._programs[unit])
            used = parts.used.tolist()
            by_row += [[at + end - self._end for at in offset], [0, *accumulate(used[:-1])], used]
            put(f"page {unit}", numbers.written(unit))
            put(f"row {unit}", parts.row)
            packed[end : end + len(pages)] = pages
            end += len(pages)
        columns = packed[: self._at["token"].start].reshape(len(by_row), -1)
        columns[:, : len(rows.counts)] = by_row
        self._numbers[: len(packed)].copy_(sent, non_blocking=True)
        if step.given is not None:
            self.tokens[: rows.total].copy_(step.given)

    def _by_row(self, step: Step, numbers: HostNumbers, owed: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """What there is of PER_ROW, in that order."""
        counts, history = step.rows.counts, step.rows.history
        none, nothing = (NONE,) * len(counts), (0,) * len(counts)
        return [
            numbers.start.tolist(),
            counts,
            history,
            [slot if before else NONE for slot, before in zip(step.read or none, history, strict=True)],
            [NONE if kept else slot for slot, kept in zip(step.write or none, step.recorded or nothing, strict=True)],
            [start for start, _ in owed] or nothing,
            [count for _, count in owed] or nothing,
        ]


def _window(pool: Pool, unit: int) -> int | None:
    reach = pool.stores[unit].unit.reach
    return None if reach is None else reach + 1


def _kv_heads(pool: Pool, unit: int) -> int:
    """Of the group's first layer."""
    kind = pool.layout.kinds[next(layer for layer, _ in pool.stores[unit].unit.fields)]
    assert isinstance(kind, PageKind)
    return kind.heads
