"""How an op sees a ragged forward: the rows its tokens belong to, and where each row's state is kept.

A forward's tokens stand one after the other, row by row: x [T, ...]. A row has a history (tokens before this forward)
and a count (tokens in it, possibly 0). Pages and Slots are views into stored state with the indices each row uses;
an op can be given explicit tensors instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a forward."""

    counts: tuple[int, ...]
    history: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] = ()  # for each row, after how many of its tokens the state is emitted too

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.history)
        assert not self.cuts or len(self.cuts) == len(self.counts)
        for cuts, count in zip(self.cuts, self.counts, strict=False):
            assert all(0 < cut <= count for cut in cuts) and list(cuts) == sorted(set(cuts)), f"cuts {cuts} of {count}"

    @property
    def total(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(row, start, end) of every row that has tokens."""
        start = 0
        for row, count in enumerate(self.counts):
            if count:
                yield row, start, start + count
            start += count

    def cuts_of(self, row: int) -> tuple[int, ...]:
        return self.cuts[row] if self.cuts else ()


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's K and V in the pages of its group, as the rows of a forward use them."""

    k: torch.Tensor  # [pages, P, H, k_dim]
    v: torch.Tensor  # [pages, P, H, v_dim]
    table: torch.Tensor  # [R, W] int64: the pages of each row, padded with the scratch page
    first: tuple[int, ...]  # the page number of each row's first entry in the table
    write_page: torch.Tensor  # [T] int64: where each new token's entry goes
    write_at: torch.Tensor  # [T] int64: and at which place in that page

    def span(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the row's tokens [start, end) in token order: [S, H, dim]."""
        size, base = self.k.shape[1], self.first[row]
        assert start >= base * size, f"token {start} is out of reach: the row's pages begin at token {base * size}"
        pages = self.table[row, start // size - base : -(-end // size) - base]
        low = start % size
        k = self.k.index_select(0, pages).flatten(0, 1)[low : low + end - start]
        v = self.v.index_select(0, pages).flatten(0, 1)[low : low + end - start]
        return k, v


@dataclass(slots=True)
class Recording:
    """The inputs that moved one part of a slot on, a row for each token, so that it can be done again in part."""

    inputs: tuple[torch.Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.inputs[0]) if self.inputs else 0

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.inputs)


@dataclass(frozen=True, slots=True)
class Slots:
    """One layer's part of the slots, as the rows of a forward use it.

    A row with history reads slot `read[row]`; one without starts from zeros. Both write `write[row]`, which may be
    the slot they read. A row's cuts go to the slots `cut[row]`, its inputs to the recording `records[row]`.
    """

    data: torch.Tensor  # [slots, *shape]
    read: tuple[int, ...]
    write: tuple[int, ...]
    cut: tuple[tuple[int, ...], ...] = ()
    records: tuple[Recording | None, ...] = ()
    fresh: frozenset[int] = frozenset()  # rows that start from zeros

    def before(self, row: int) -> torch.Tensor:
        """What the row starts from. Zeros are made in the slot that it writes, when its turn comes."""
        if row in self.fresh:
            return self.data[self.write[row]].zero_()
        return self.data[self.read[row]]

    def record(self, row: int, *inputs: torch.Tensor) -> None:
        """Keep the inputs of a row, if that was asked for. They are copied: what they are part of need not be kept."""
        if self.records and (recording := self.records[row]) is not None:
            recording.inputs = tuple(each.clone() for each in inputs)

    def cuts_of(self, row: int, rows: Rows) -> dict[int, int]:
        """The slot of each of the row's cuts."""
        return dict(zip(rows.cuts_of(row), self.cut[row] if self.cut else (), strict=True))


@dataclass(frozen=True, slots=True)
class Carried:
    """What an op with slots gives: its output and, where the state was explicit, what became of that."""

    out: torch.Tensor  # [T, ...]
    state: torch.Tensor | None = None  # [R, *shape]: after each row's tokens
    cuts: tuple[torch.Tensor, ...] = ()  # for each row [cuts, *shape]


def open_slots(op: str, rows: Rows, stored: Slots | None, explicit: torch.Tensor | None) -> Slots:
    """The slots that an op works on, every row with something to read.

    Those stored, where rows without history start from zeros; or, for explicit state, slots of its own: one a row, then
    one a cut.
    """
    if (stored is None) == (explicit is None):
        raise ValueError(f"{op} takes stored slots or explicit state: exactly one of them")
    if explicit is not None:
        count = len(rows.counts)
        ids = iter(range(count, count + sum(map(len, rows.cuts))))
        cut = tuple(tuple(next(ids) for _ in rows.cuts_of(row)) for row in range(count))
        data = torch.cat([explicit, explicit.new_empty(sum(map(len, cut)), *explicit.shape[1:])])
        return Slots(data, tuple(range(count)), tuple(range(count)), cut)
    assert stored is not None
    if all(rows.history):
        return stored
    return replace(stored, fresh=frozenset(row for row, history in enumerate(rows.history) if not history))


def close_slots(out: torch.Tensor, slots: Slots, explicit: torch.Tensor | None) -> Carried:
    """The output, with the states that `open_slots` made room for where they were explicit."""
    if explicit is None:
        return Carried(out)
    return Carried(out, slots.data[: len(explicit)], tuple(slots.data[list(cut)] for cut in slots.cut))
