"""Step: the tensors of one forward over the tokens of several sequences.

Models read it and write state through it; it owns nothing. A Reservation makes one for live states; `rehearsal` makes
one whose every row reads and writes the scratch entries, so that a forward of any shape can be measured without
touching a sequence.

What kernels read of it are its Numbers: made on the host, and sent to the device when they are asked for. A step of
Fixed numbers (fixed.py) has them at addresses that stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bough.ops.attention import Mask
from bough.ops.ragged import Owed, Pages, Rows, ShortRows, Slots, Spans
from bough.ops.sent import sent
from bough.state.pool import Pool
from bough.state.recordings import Recordings
from bough.state.store import EMPTY, Run

if TYPE_CHECKING:
    from bough.state.live import State

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which pages the rows of a step read, and where their new tokens go; one for each page group."""

    table: Tensor  # [N] int32
    offset: tuple[int, ...]
    write_page: Tensor  # [T] int32
    write_at: Tensor  # [T] int32
    spans: Spans | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """The last tokens of a step's rows."""

    counts: tuple[int, ...]  # of each row
    places: Tensor  # [N]: which of the step's tokens they are

    @staticmethod
    def of(rows: Rows, counts: Sequence[int], device: torch.device) -> "Ends":
        ends = accumulate(rows.counts)
        places = [at for end, count in zip(ends, counts, strict=True) for at in range(end - count, end)]
        return Ends(tuple(counts), sent(torch.tensor(places, dtype=torch.int64), device))


class Numbers(Protocol):
    """What kernels read of a step."""

    @property
    def tokens(self) -> Tensor: ...  # [T]
    @property
    def positions(self) -> Tensor: ...  # [T]
    @property
    def short(self) -> ShortRows | None: ...
    def owed(self, late: bool) -> Owed | None: ...  # of parts that are late, or of the others
    def table(self, unit: int) -> PageTable: ...


class HostNumbers:
    """The numbers of one step, on the host; on the device they are where there was room."""

    def __init__(
        self,
        pool: Pool,
        rows: Rows,
        tokens: Ints,
        runs: dict[int, list[Run]],
        known: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Entries of tokens before `known`, a length a row, are there already: what is computed goes to scratch."""
        self.pool, self.rows, self.fed, self.runs, self.known = pool, rows, tokens, runs, known
        self.short: ShortRows | None = None
        row, inside = tokens_of(rows.counts)
        self.places: Ints = np.array(rows.history, np.int64)[row] + inside  # the position of each token
        self.page, self.in_page = np.divmod(self.places, pool.layout.page_tokens)  # its page's number, its place there
        self._tables: dict[int, PageTable] = {}
        self._pages: dict[int, tuple[Ints, list[int]]] = {}

    @cached_property
    def tokens(self) -> Tensor:
        return sent(torch.from_numpy(self.fed), self.pool.device)

    @cached_property
    def positions(self) -> Tensor:
        return sent(torch.from_numpy(self.places.astype(np.int32)), self.pool.device)

    def owed(self, late: bool) -> Owed | None:
        """Nothing: whatever rows owe is done before."""

    def table(self, unit: int) -> PageTable:
        if unit not in self._tables:
            pages, offset = self.pages(unit)
            parts = pages, self.written(unit), self.in_page
            made = (torch.from_numpy(each.astype(np.int32)) for each in parts)
            table, page, at = (sent(each, self.pool.device) for each in made)
            self._tables[unit] = PageTable(table, tuple(offset), page, at)
        return self._tables[unit]

    def pages(self, unit: int) -> tuple[Ints, list[int]]:
        """The pages of all rows, and for each where in there page number 0 is, or would be."""
        if unit not in self._pages:
            runs = self.runs[unit]
            ids = [run.ids for run in runs]
            starts = accumulate(map(len, ids), initial=0)
            offset = [start - run.first for start, run in zip(starts, runs, strict=False)]
            self._pages[unit] = np.concatenate(ids) if ids else EMPTY.ids, offset
        return self._pages[unit]

    def written(self, unit: int) -> Ints:
        """The page that each token's entry goes to."""
        pages, offset = self.pages(unit)
        row, _ = tokens_of(self.rows.counts)
        written: Ints = pages[np.array(offset, np.int64)[row] + self.page]
        if self.known is not None and self.known[unit] != self.rows.history:
            written[self.places < np.array(self.known[unit], np.int64)[row]] = self.pool.stores[unit].scratch
        return written


@lru_cache(64)
def tokens_of(counts: tuple[int, ...]) -> tuple[Ints, Ints]:
    """The row of each token, and how many of the row's come before it. Steps of the same shape follow one another."""
    each = np.array(counts, np.int64)
    row = np.arange(len(each)).repeat(each)
    return row, np.arange(len(row)) - (each.cumsum() - each)[row]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: its rows and tokens, and the state each row reads and writes."""

    pool: Pool
    rows: Rows
    numbers: Numbers
    read: tuple[int, ...] = ()  # the slot of each row; scratch where there is none
    write: tuple[int, ...] = ()
    cut: tuple[tuple[int, ...], ...] = ()  # the slots of each row's cuts
    recorded: tuple[bool, ...] = ()  # whether a row's inputs are kept
    recordings: Recordings | None = None  # where, if any are
    masks: tuple[Mask | None, ...] | None = None  # what a row's tokens see beyond or short of causal order
    given: Tensor | None = None  # tokens [T], instead of those among the numbers
    states: tuple["State", ...] = ()  # whose rows they are
    wanted: Ends | None = None  # the tokens whose hidden rows are asked for; None: all

    @staticmethod
    def rehearsal(pool: Pool, counts: Sequence[int], history: Sequence[int]) -> "Step":
        """A step of this shape over made-up tokens that reads and writes scratch alone."""
        rows = Rows(tuple(counts), tuple(history))
        size = pool.layout.page_tokens
        runs: dict[int, list[Run]] = {unit: [] for unit in pool.page_stores}
        for unit, made_up in runs.items():
            store = pool.stores[unit]
            for h, n in zip(history, counts, strict=True):
                first = store.unit.earliest(h) // size
                made_up.append(Run(first, np.full(-(-(h + n) // size) - first, store.scratch, np.int64)))
        slots = () if pool.slot_store is None else (pool.stores[pool.slot_store].scratch,) * len(counts)
        return Step(pool, rows, HostNumbers(pool, rows, np.zeros(rows.total, np.int64), runs), slots, slots)

    def at_ends(self, ends: Ends) -> "Step":
        """The same for layers that take the last tokens alone, read what is stored, and store nothing."""
        assert self.masks is None
        counts, history = self.rows.counts, self.rows.history
        before = tuple(h + n - kept for h, n, kept in zip(history, counts, ends.counts, strict=True))
        return replace(self, rows=Rows(ends.counts, before), wanted=None)

    @property
    def tokens(self) -> Tensor:
        return self.numbers.tokens if self.given is None else self.given

    @property
    def positions(self) -> Tensor:
        return self.numbers.positions

    def pages(self, layer: int) -> Pages:
        """The K and V pages of a layer, as this step's rows use them."""
        table = self.numbers.table(self.pool.layout.unit_of[layer])
        k, v = self.pool.part(layer, "k"), self.pool.part(layer, "v")
        return Pages(k, v, table.table, table.offset, table.write_page, table.write_at, table.spans)

    def slots(self, layer: int, part: str) -> Slots:
        """A part of a layer's slots, as this step's rows use it."""
        data, numbers = self.pool.part(layer, part), self.numbers
        keeping = self.recordings if any(self.recorded) else None
        record = None if keeping is None else keeping.parts.get((layer, part))
        owed = None if record is None else numbers.owed(record.late)
        return Slots(data, self.read, self.write, self.cut, self.recorded, record, short=numbers.short, owed=owed)
