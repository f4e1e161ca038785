"""How an op sees a ragged forward: the rows its tokens belong to, and where each row's state is kept.

A forward's tokens stand one after the other, row by row: x [T, ...]. A row has a history (tokens before this forward)
and a count (tokens in it, possibly 0). Pages and Slots are views into stored state with the indices each row uses;
an op can be given explicit tensors instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from bough.ops.spans import FEW


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a forward."""

    counts: tuple[int, ...]
    history: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] = ()  # for each row, after how many of its tokens the state is emitted too

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.history)
        for cuts, count in zip(self.cuts, self.counts, strict=True) if self.cuts else ():
            assert all(0 < cut <= count for cut in cuts) and list(cuts) == sorted(set(cuts)), f"cuts {cuts} of {count}"

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def are_short(self) -> bool:
        """Whether none has more tokens than can be answered together."""
        return max(self.counts, default=0) <= FEW

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(row, start, end) of every row that has tokens."""
        start = 0
        for row, count in enumerate(self.counts):
            if count:
                yield row, start, start + count
            start += count

    def cuts_of(self, row: int) -> tuple[int, ...]:
        return self.cuts[row] if self.cuts else ()


class ShortRows(NamedTuple):
    """Rows of a few tokens and their slots, as kernels read them: int32 tensors on the device."""

    start: torch.Tensor  # [R]: the first token of each
    tokens: torch.Tensor
    read: torch.Tensor  # [R]: slots; below 0: it starts from zeros
    write: torch.Tensor  # below 0: nothing is written


class Spans(NamedTuple):
    """How the keys of rows of a few tokens are divided among programs: int32 tensors on the device."""

    start: torch.Tensor  # [R]: the first token of each row
    tokens: torch.Tensor
    history: torch.Tensor
    offset: torch.Tensor  # [R]: of each row's pages in the table
    first: torch.Tensor  # [R]: of its spans
    used: torch.Tensor  # [R]: how many spans it has
    row: torch.Tensor  # [N]: of each span; below 0: there is none


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's K and V in the pages of its group, as the rows of a forward use them."""

    k: torch.Tensor  # [pages, P, H, k_dim]
    v: torch.Tensor  # [pages, P, H, v_dim]
    table: torch.Tensor  # [N] int32: the pages of all rows
    offset: tuple[int, ...]  # page number p of a row is table[offset[row] + p]
    write_page: torch.Tensor  # [T] int32: where each new token's entry goes
    write_at: torch.Tensor  # [T] int32: and at which place in that page
    spans: Spans | None = None  # where they are made already

    def span(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the row's tokens [start, end) in token order: [S, H, dim]."""
        if self.spans is not None:
            raise RuntimeError("rows whose numbers are on a device alone can only be read by kernels there")
        size, base = self.k.shape[1], self.offset[row]
        assert start // size + base >= 0, f"token {start} is out of reach"
        pages = self.table[base + start // size : base - (-end // size)]
        low = start % size
        k = self.k.index_select(0, pages).flatten(0, 1)[low : low + end - start]
        v = self.v.index_select(0, pages).flatten(0, 1)[low : low + end - start]
        return k, v


@dataclass(slots=True)
class Recording:
    """The inputs that moved one part of slots on, a row for each token, so that it can be done again in part."""

    inputs: tuple[torch.Tensor, ...] = ()
    most: int = 0  # tokens that there is room for, where it lasts for several forwards
    late: bool = False  # whether that part of slots is left behind where it can be

    def room(self, *inputs: tuple[torch.Tensor, torch.dtype]) -> tuple[torch.Tensor, ...]:
        """Room [most, ...], made at the first time, for inputs [T, ...] like these in other dtypes."""
        if not self.inputs:
            self.inputs = tuple(each.new_empty(self.most, *each.shape[1:], dtype=dtype) for each, dtype in inputs)
        return self.inputs

    @property
    def tokens(self) -> int:
        return len(self.inputs[0]) if self.inputs else 0

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.inputs)


Replayed = tuple[torch.Tensor, tuple[torch.Tensor, ...]]  # one layer's part of the slots, and its recorded inputs


NONE = -1  # no slot
OWED = 16  # recorded tokens that a slot is moved on by at the most, on the way
STRETCH = 2 * OWED  # of a journal that each state has: a half has room for as many as may be owed
assert FEW <= OWED, "what a row records at a time finds room behind nothing"


class Owed(NamedTuple):
    """What rows do with slots that lag behind: int32 tensors on the device.

    A slot is first moved on by tokens that forwards before have recorded. Those of this one are recorded in their turn.
    """

    start: torch.Tensor  # [R]: the first recorded token that the slot is to be moved on by
    tokens: torch.Tensor  # [R]: how many there are, up to OWED
    keep: torch.Tensor  # [R]: the slot that this is stored to; below 0: none
    record: torch.Tensor  # [R]: where its own tokens are recorded, the first one


class ReplayedRow(NamedTuple):
    """A slot that the inputs of some tokens are applied to."""

    slot: int
    start: int  # token
    tokens: int


@dataclass(frozen=True, slots=True)
class Slots:
    """One layer's part of the slots, as the rows of a forward use it.

    A row with history reads slot `read[row]`; one without starts from zeros. Both write `write[row]`, which may be
    the slot they read. A row's cuts go to the slots `cut[row]`. The inputs of rows that are `recorded` go to the
    recording, one row's after the other's; where all rows are short those of the others do too.
    """

    data: torch.Tensor  # [slots, *shape]
    read: tuple[int, ...]
    write: tuple[int, ...]
    cut: tuple[tuple[int, ...], ...] = ()
    recorded: tuple[bool, ...] = ()  # for each row
    recording: Recording | None = None
    fresh: frozenset[int] = frozenset()  # rows that start from zeros
    short: ShortRows | None = None  # where they are made already
    owed: Owed | None = None  # where kernels record, and first move slots on by what was recorded before

    def before(self, row: int) -> torch.Tensor:
        """What the row starts from. Zeros are made in the slot that it writes, when its turn comes."""
        if self.short is not None:
            raise RuntimeError("rows whose numbers are on a device alone can only be read by kernels there")
        if row in self.fresh:
            return self.data[self.write[row]].zero_()
        return self.data[self.read[row]]

    def record(self, rows: Rows, *inputs: torch.Tensor) -> None:
        """Keep the inputs [T, ...] of the rows for which that was asked."""
        if self.recording is None or self.owed is not None:
            return
        if self.short is not None:
            self.recording.inputs = inputs  # at places that stay
        elif rows.are_short:
            self.recording.inputs = tuple(each.clone() for each in inputs)  # what they are part of need not be kept
        else:
            kept = [slice(start, end) for row, start, end in rows if self.recorded[row]] or [slice(0)]
            self.recording.inputs = tuple(torch.cat([each[tokens] for tokens in kept]) for each in inputs)

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
