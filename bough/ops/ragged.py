"""How an op sees a ragged forward: the rows its tokens belong to, and where each row's state is kept.

A forward's tokens stand one after the other, row by row: x [T, ...]. A row has a history (tokens before this forward)
and a count (tokens in it, possibly 0). Pages and Slots are views into stored state with the indices each row uses;
an op can be given explicit tensors instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
        size = self.k.shape[1]
        base = self.first[row]
        pages = self.table[row, start // size - base : -(-end // size) - base]
        low = start % size
        k = self.k.index_select(0, pages).flatten(0, 1)[low : low + end - start]
        v = self.v.index_select(0, pages).flatten(0, 1)[low : low + end - start]
        return k, v


@dataclass(frozen=True, slots=True)
class Slots:
    """One layer's part of the slots, as the rows of a forward use it.

    A row with history reads slot `read[row]`; one without starts from zeros. Both write `write[row]`, which may be
    the slot they read. A row's cuts go to the slots `cut[row]`.
    """

    data: torch.Tensor  # [slots, *shape]
    read: tuple[int, ...]
    write: tuple[int, ...]
    cut: tuple[tuple[int, ...], ...] = ()
