"""What a draft round has come to, and the numbers of the next one, where the device alone knows.

A round feeds each row its last token and a draft. How many of these stand is seen by comparing what was chosen after
each with what was fed next; and the next round begins behind those. Both are counted here, so that it can be launched
before anybody has looked.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bough.ops.ragged import NONE, OWED, STRETCH
from bough.ops.twins import twins


class RoundNumbers(NamedTuple):
    """The numbers of a round that follow from where each row is: int32 tensors on the device.

    Of rows [R] and tokens [T] that are there or not: those that are not have no tokens.
    """

    start: Tensor  # [R]: the first token of each row
    tokens: Tensor  # [R]: how many it has
    history: Tensor  # [R]
    slot: Tensor  # [R]
    owed_start: Tensor  # [R]: where what the row owes begins in the journal
    record: Tensor  # [R]: where its own tokens are recorded
    owed: tuple[Tensor, ...]  # [R], of parts that are late and of the others alike
    keep: tuple[Tensor, ...]  # [R]
    offset: Tensor  # [R]: of its pages
    token: Tensor  # [T]
    position: Tensor  # [T]
    place: Tensor  # [T]: in its page
    page: Tensor  # [T]
    pages: Tensor  # [N]: those of all rows


def standing(chosen: Tensor, fed: Tensor, start: Tensor, tokens: Tensor) -> Tensor:
    """How many of each row's tokens stand [R] int32: its first one, and drafted ones while they are those chosen.

    Of tokens `fed` [T] each row has `tokens` from `start` on, at least one; `chosen` [T] follow each of them.
    """
    if (fast := twins(chosen)) is not None:
        found: Tensor = fast.standing(chosen, fed, start, tokens)
        return found
    kept = torch.ones_like(tokens)
    for row, (first, count) in enumerate(zip(start.tolist(), tokens.tolist(), strict=True)):
        alike = chosen[first : first + count - 1] == fed[first + 1 : first + count]
        kept[row] += alike.int().cumprod(0).sum()
    return kept


def go_on(numbers: RoundNumbers, kept: Tensor, chosen: Tensor, page_tokens: int) -> None:
    """Make the numbers of a round those of the next one, of which each row keeps `kept` [R] tokens, one at least.

    They say where each row was before, what it owed then, and all pages that there may be. It is fed as many tokens
    again, of which the first is the one `chosen` [T] after the last that it keeps.
    """
    if (fast := twins(chosen)) is not None:
        fast.go_on(numbers, kept, chosen, page_tokens)
        return
    rows = len(kept)
    start, tokens, at = (each[:rows] for each in (numbers.start, numbers.tokens, numbers.owed_start))
    numbers.history[:rows] += kept
    owed = numbers.owed[0][:rows] + kept
    stores = owed + tokens > OWED
    stretch = at // STRETCH * STRETCH
    numbers.record[:rows] = torch.where(stores, stretch + OWED * (at == stretch), at + owed)
    for many, slot in zip(numbers.owed, numbers.keep, strict=True):
        many[:rows] = owed
        slot[:rows] = torch.where(stores, numbers.slot[:rows], NONE)
    numbers.token[start.long()] = chosen[(start + kept - 1).long()].to(numbers.token.dtype)
    row = torch.arange(rows, device=kept.device).repeat_interleave(tokens)
    count = len(row)
    position = numbers.history[:rows][row] + torch.arange(count, device=kept.device) - start[row]
    numbers.position[:count], numbers.place[:count] = position, position % page_tokens
    numbers.page[:count] = numbers.pages[(numbers.offset[:rows][row] + position // page_tokens).long()]
