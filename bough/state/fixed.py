"""Fixed: the numbers of a step at addresses that stay, so that work captured over them can be done again with others.

It holds up to so many rows and tokens. Rows that are not there have no tokens; tokens that are not there belong to no
row, and their entries go to scratch. All numbers lie in one buffer, with the pages of all rows last, so that one copy
sends what is used of it.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bough.ops.ragged import NONE, Owed, Rows, ShortRows, Spans
from bough.ops.rounds import RoundNumbers, go_on
from bough.ops.spans import FEW, divided, most_spans, programs
from bough.state.kinds import PageKind
from bough.state.pool import Pool
from bough.state.recordings import PLACE, Place, Recordings
from bough.state.steady import Steady
from bough.state.step import HostNumbers, PageTable, Step, tokens_of
from bough.state.store import Ids

Values = Sequence[int] | Ids

PER_ROW = ("start", "tokens", "history", "read", "write", *PLACE)
OF_PAGES = ("offset", "first", "used")  # of each row too, for each page group
PER_TOKEN = ("token", "position", "place")


class _Unsent(NamedTuple):
    """Room for numbers that are yet to be sent, and the views of it: to make these takes longer than to copy it."""

    buffer: Tensor
    target: Tensor  # where it goes on the device
    packed: NDArray[np.int32]  # the buffer
    by_row: NDArray[np.int32]  # [.., rows]: its beginning

    def send(self) -> None:
        """Nobody waits for it."""
        self.target.copy_(self.buffer, non_blocking=True)


class Prepared(NamedTuple):
    """Such room for a step to come, and where in it each of its numbers goes."""

    unsent: _Unsent
    numbers: dict[str, NDArray[np.int32]]


class Fixed:
    """Room for the numbers of `rows` rows of up to `each` tokens, of a context each."""

    def __init__(self, pool: Pool, rows: int, each: int, context: int) -> None:
        self.pool, self.rows, self.each = pool, rows, each
        self._windows = {unit: _window(pool, unit) for unit in pool.page_stores}
        self.programs = {unit: programs(pool.device, _kv_heads(pool, unit), rows) for unit in pool.page_stores}
        self._at: dict[str, slice] = {}
        self._end = 0
        for name, size in self._sizes():
            self._at[name] = slice(self._end, self._end + size)
            self._end += -(-size // 4) * 4  # 16 bytes
        pages = len(pool.page_stores) * rows * (-(-(context + FEW) // pool.layout.page_tokens) + 1)  # drafts go past it
        self._starts = [at.start for at in self._at.values() if at.start >= self._at["token"].start]
        self._blank = self._without_rows()
        with torch.inference_mode(mode=False):  # or they could be written in that mode alone
            self._numbers = torch.zeros(self._end + pages, dtype=torch.int32, device=pool.device)
        self._numbers[: self._end] = torch.from_numpy(self._blank)
        self._used = self._end  # numbers that the last step had which was not prepared
        self._unsent: _Unsent | None = None
        self.tokens, self.positions = self._view("token"), self._view("position")
        self.short = ShortRows(*(self._view(name) for name in ("start", "tokens", "read", "write")))

    def _sizes(self) -> Iterable[tuple[str, int]]:
        units = self.pool.page_stores
        yield from ((name, self.rows) for name in PER_ROW)
        yield from ((f"{name} {unit}", self.rows) for unit in units for name in OF_PAGES)
        yield from ((name, self.rows * self.each) for name in PER_TOKEN)
        yield from ((f"page {unit}", self.rows * self.each) for unit in units)
        yield from ((f"row {unit}", most_spans(self.rows, self.programs[unit])) for unit in units)

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
        numbers, counts, history, end = step.numbers, step.rows.counts, step.rows.history, 0
        none = (NONE,) * len(counts)
        read, write = step.read or none, step.write or none
        if 0 in history:
            read = tuple([slot if before else NONE for slot, before in zip(read, history, strict=True)])
        if any(step.recorded):
            write = tuple([NONE if kept else slot for slot, kept in zip(write, step.recorded, strict=True)])
        by_row: list[Sequence[int]] = [[0, *accumulate(counts[:-1])], counts, history, read, write]
        by_row += zip(*places, strict=True) if places else [[blank] * len(counts) for blank in PLACE.values()]
        written, spans, tables = list[Values](), list[Values](), list[Ids]()
        for unit in self.pool.page_stores:
            pages, offset = numbers.pages(unit)
            parts = divided(counts, history, self._windows[unit], self.programs[unit])
            by_row += [[at + end for at in offset], [0, *accumulate(parts.used[:-1])], parts.used]
            written.append(numbers.written(unit))
            spans.append(parts.row)
            tables.append(pages)
            end += len(pages)
        self._send(by_row, [numbers.fed, numbers.places, numbers.in_page, *written, *spans], tables)
        if step.given is not None:
            self.tokens[: step.rows.total].copy_(step.given)

    def fill_steady(self, rows: Steady) -> None:
        """The same for a steady step."""
        counts, ids = rows.counts, [run.ids for run in rows.runs]
        parts = divided(counts, rows.history, None, self.programs[rows.unit])
        by_row: list[Sequence[int]] = [[0, *accumulate(counts[:-1])], counts, rows.history, rows.slots]
        by_row += [[NONE] * len(counts) if rows.drafted else rows.slots, *zip(*rows.places, strict=True)]
        by_row += [[0, *accumulate(map(len, ids[:-1]))], [0, *accumulate(parts.used[:-1])], parts.used]
        self._send(by_row, [rows.tokens, *self._where(rows), parts.row], ids)

    def _where(self, rows: Steady) -> tuple[Values, Values, Values]:
        """The position of each token, its place in its page, and that page. One row takes longer with arrays."""
        size = self.pool.layout.page_tokens
        if len(rows.counts) == 1 and not rows.across:
            (before,), (count,) = rows.history, rows.counts
            inside = before % size
            return [*range(before, before + count)], [*range(inside, inside + count)], rows.lasts * count
        row, from_first = tokens_of(tuple(rows.counts))
        position, page = np.array((rows.history, rows.lasts))[:, row]
        position += from_first
        for start, pages in rows.across:
            page[start : start + len(pages)] = pages
        return position, position % size, page

    def _send(self, by_row: Sequence[Sequence[int]], others: Sequence[Values], ids: Sequence[Ids]) -> None:
        """Send numbers of rows, then those of tokens and spans, then pages."""
        self._used = self._end + sum(map(len, ids))
        unsent, self._unsent = self._unsent, None  # whatever becomes of it
        if unsent is None or len(unsent.packed) < self._used:
            unsent = self._buffer(self._used)
        packed = unsent.packed
        unsent.by_row[:, : len(by_row[0])] = by_row
        for start, values in zip(self._starts, others, strict=True):
            packed[start : start + len(values)] = values
        if ids:
            np.concatenate(ids, out=packed[self._end : self._used], casting="unsafe")
        unsent.send()

    def make_ready(self) -> None:
        """Have a buffer for the next numbers, while the device is at work on those that were sent.

        It is for the pages that were used last, and one more of each row.
        """
        self._unsent = self._buffer(min(self._used + len(self.pool.page_stores) * self.rows, len(self._numbers)))

    def prepare(self, unit: int, rows: int, tokens: int, pages: int) -> Prepared | None:
        """The same for a step of so many rows of one page group, so many tokens and pages, if there is room for it."""
        if self._end + pages > len(self._numbers):
            return None
        unsent, at = self._buffer(self._end + pages), self._at
        packed = unsent.packed
        made = {name: packed[at[name].start :][:rows] for name in PER_ROW}
        made |= {name: packed[at[f"{name} {unit}"].start :][:rows] for name in OF_PAGES}
        made |= {name: packed[at[name].start :][:tokens] for name in PER_TOKEN}
        made |= {"page": packed[at[f"page {unit}"].start :][:tokens], "row": packed[at[f"row {unit}"]]}
        return Prepared(unsent, made | {"pages": packed[self._end :]})

    def go_on(self, kept: Tensor, chosen: Tensor) -> None:
        """Make the numbers of a round that were sent those of the next, on the device alone (ops/rounds.py)."""
        go_on(self._round, kept, chosen, self.pool.layout.page_tokens)

    @cached_property
    def _round(self) -> RoundNumbers:
        (unit,) = self.pool.page_stores
        alike = {name: self._view(name) for name in ("start", "tokens", "history", "owed_start", "record", *PER_TOKEN)}
        return RoundNumbers(
            slot=self._view("read"),
            owed=(self._view("owed"), self._view("late_owed")),
            keep=(self._view("keep"), self._view("late_keep")),
            offset=self._view(f"offset {unit}"),
            page=self._view(f"page {unit}"),
            pages=self._numbers[self._end :],
            **alike,
        )

    def _buffer(self, size: int) -> _Unsent:
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=self.pool.device.type == "cuda")
        packed = buffer.numpy()
        packed[: self._end] = self._blank
        by_row = packed[: self._at["token"].start].reshape(-1, self._at[PER_ROW[1]].start)
        return _Unsent(buffer, self._numbers[:size], packed, by_row)


def _window(pool: Pool, unit: int) -> int | None:
    reach = pool.stores[unit].unit.reach
    return None if reach is None else reach + 1


def _kv_heads(pool: Pool, unit: int) -> int:
    """Of the group's first layer."""
    kind = pool.layout.kinds[next(layer for layer, _ in pool.stores[unit].unit.fields)]
    assert isinstance(kind, PageKind)
    return kind.heads
