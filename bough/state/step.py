"""Step: the tensors of one forward over the tokens of several sequences.

Models read it and write state through it; it owns nothing. A Reservation makes one for live states; `rehearsal` makes
one whose every row reads and writes the scratch entries, so that a forward of any shape can be measured without
touching a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bough.ops.attention import Mask
from bough.ops.ragged import Pages, Recording, Rows, Slots
from bough.state.pool import Pool
from bough.state.store import Run

Ints = NDArray[np.int64]
Recordings = tuple[dict[tuple[int, str], Recording] | None, ...]


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which pages the rows of a step read, and where their new tokens go; one for each page group."""

    table: torch.Tensor  # [R, W] int64
    first: tuple[int, ...]
    write_page: torch.Tensor  # [T] int64
    write_at: torch.Tensor  # [T] int64

    @staticmethod
    def of(
        runs: Sequence[Run], rows: Rows, positions: Ints, known: Sequence[int], page_tokens: int, scratch: int
    ) -> "PageTable":
        """Entries of tokens before `known`, a length a row, are there already: what is computed goes to scratch."""
        table = np.full((len(runs), max((len(run.ids) for run in runs), default=0)), scratch, np.int64)
        write_page = np.full(rows.total, scratch, np.int64)
        for row, run in enumerate(runs):
            table[row, : len(run.ids)] = run.ids
        for row, start, end in rows:
            new = min(end, start + max(0, known[row] - rows.history[row]))
            write_page[new:end] = runs[row].ids[positions[new:end] // page_tokens - runs[row].first]
        return PageTable(
            torch.from_numpy(table),
            tuple(run.first for run in runs),
            torch.from_numpy(write_page),
            torch.from_numpy(positions % page_tokens),
        )

    def to(self, device: torch.device) -> "PageTable":
        return PageTable(self.table.to(device), self.first, self.write_page.to(device), self.write_at.to(device))


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: its tokens and their positions [T], its rows, and the state each row reads and writes."""

    pool: Pool
    rows: Rows
    tokens: torch.Tensor
    positions: torch.Tensor
    tables: dict[int, PageTable]  # by page group
    read: tuple[int, ...]  # the slot of each row; scratch where there is none
    write: tuple[int, ...]
    cut: tuple[tuple[int, ...], ...]  # the slots of each row's cuts
    recordings: Recordings  # where each row's inputs are kept, by layer and part; None: they are not
    masks: tuple[Mask | None, ...] | None = None  # what a row's tokens see beyond or short of causal order

    @staticmethod
    def of(
        pool: Pool,
        rows: Rows,
        tokens: torch.Tensor,
        runs: dict[int, list[Run]],
        *,
        known: dict[int, list[int]] | None = None,
        read: tuple[int, ...] = (),
        write: tuple[int, ...] = (),
        cut: tuple[tuple[int, ...], ...] = (),
        recordings: Recordings = (),
        masks: tuple[Mask | None, ...] | None = None,
    ) -> "Step":
        spans = [np.arange(h, h + n, dtype=np.int64) for h, n in zip(rows.history, rows.counts, strict=True)]
        positions: Ints = np.concatenate(spans) if spans else np.empty(0, np.int64)
        size = pool.layout.page_tokens
        tables = {
            unit: PageTable.of(
                used, rows, positions, known[unit] if known else rows.history, size, pool.stores[unit].scratch
            ).to(pool.device)
            for unit, used in runs.items()
        }
        return Step(
            pool,
            rows,
            tokens,
            torch.from_numpy(positions).to(pool.device),
            tables,
            read,
            write,
            cut,
            recordings,
            masks,
        )

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
        tokens = torch.zeros(rows.total, dtype=torch.int64, device=pool.device)
        return Step.of(pool, rows, tokens, runs, read=slots, write=slots)

    def pages(self, layer: int) -> Pages:
        """The K and V pages of a layer, as this step's rows use them."""
        table = self.tables[self.pool.layout.unit_of[layer]]
        k, v = self.pool.part(layer, "k"), self.pool.part(layer, "v")
        return Pages(k, v, table.table, table.first, table.write_page, table.write_at)

    def slots(self, layer: int, part: str) -> Slots:
        """A part of a layer's slots, as this step's rows use it."""
        records = tuple(None if each is None else each[layer, part] for each in self.recordings)
        return Slots(self.pool.part(layer, part), self.read, self.write, self.cut, records)
