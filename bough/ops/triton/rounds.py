# mypy: allow-untyped-defs, allow-incomplete-defs
"""What a draft round has come to, and the numbers of the next one: a program for each row."""

import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import NONE, OWED, STRETCH
from bough.ops.rounds import RoundNumbers
from bough.ops.spans import FEW

BLOCK = triton.next_power_of_2(FEW)


@triton.jit(do_not_specialize_on_alignment=["fed", "starts", "counts"])  # parts of one tensor, by the number of rows
def _standing(chosen, fed, starts, counts, kept, block: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, block)
    start, count = tl.load(starts + row), tl.load(counts + row)
    drafted = i < count - 1
    after = tl.load(chosen + start + i, mask=drafted, other=0)
    guessed = tl.load(fed + start + 1 + i, mask=drafted, other=0)
    falls = tl.where(drafted & (after == guessed), block, i)  # the first one that does not stand
    tl.store(kept + row, 1 + tl.min(falls, 0))


@triton.jit
def _go_on(
    start, tokens, history, slot, owed_start, record, owed, keep, offset, token, position, place, page, pages,
    kept, chosen, size, most: tl.constexpr, none: tl.constexpr, stretch: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0), tl.arange(0, block)
    first, count, stands = tl.load(start + row), tl.load(tokens + row), tl.load(kept + row)
    before, at = tl.load(history + row) + stands, tl.load(owed_start + row)
    owing = tl.load(owed[0] + row) + stands
    stores = owing + count > most
    begin = at // stretch * stretch
    tl.store(history + row, before)
    tl.store(record + row, tl.where(stores, tl.where(at == begin, begin + most, begin), at + owing))
    stored = tl.where(stores, tl.load(slot + row), none)
    for part in tl.static_range(len(owed)):
        tl.store(owed[part] + row, owing)
        tl.store(keep[part] + row, stored)
    tl.store(token + first, tl.load(chosen + first + stands - 1).to(tl.int32))
    where, there = before + i, i < count
    tl.store(position + first + i, where, mask=there)
    tl.store(place + first + i, where % size, mask=there)
    number = tl.load(pages + tl.load(offset + row) + where // size, mask=there, other=0)
    tl.store(page + first + i, number, mask=there)


def standing(chosen: Tensor, fed: Tensor, start: Tensor, tokens: Tensor) -> Tensor:
    """The twin of ops.standing."""
    kept = tokens.new_empty(len(tokens))
    _standing[(len(tokens),)](chosen, fed, start, tokens, kept, block=BLOCK, num_warps=1)
    return kept


def go_on(numbers: RoundNumbers, kept: Tensor, chosen: Tensor, page_tokens: int) -> None:
    """The twin of ops.go_on."""
    _go_on[(len(kept),)](
        *numbers, kept, chosen, page_tokens, most=OWED, none=NONE, stretch=STRETCH, block=BLOCK, num_warps=1
    )
