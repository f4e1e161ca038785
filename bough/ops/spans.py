"""How the keys of rows of a few tokens are divided among programs, so that all processors of a device have work."""

from collections.abc import Sequence
from functools import cache
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

FEW = 9  # new tokens of a row, up to which its queries are answered together
SPAN = 64  # keys that are worth a program of their own; spans begin at multiples of it
ROUNDS = 2  # programs for each processor: as many as run on it at a time; of few rows it is one
JOIN = 2  # keys that a program reads while it joins one more span of a query
APART = 4  # rows, up to which there are enough spans of each that to join them is work for many programs
REST = 4  # parts of a span, of which one is too little for a span of its own where it is left over


class Division(NamedTuple):
    """Rows and their spans, on the host."""

    used: list[int]  # [R]: spans of each row
    row: list[int]  # [N]: the row of each span


def divided(counts: Sequence[int], history: Sequence[int], window: int | None, programs: int) -> Division:
    """Spans for rows of 1 to FEW new tokens, about as many as there shall be programs; others get none.

    The keys of a row, SPAN by SPAN, are shared out among its spans evenly. Spans are about as long in all rows, since
    it takes until the longest row is done: where to read one of its spans takes as long as to join them, at the least.
    Of few rows, new tokens weigh as much as SPAN keys more: who has them begins later (ops/triton/attention.py).
    """
    keys = [before + count if 0 < count <= FEW else 0 for before, count in zip(history, counts, strict=True)]
    if window is not None:
        keys = [n and n - max(0, h - window + 1) // SPAN * SPAN for n, h in zip(keys, history, strict=True)]
    if not joined_apart(len(keys)):
        shared = shared_out(np.array(keys), max([n for n in counts if n <= FEW], default=0), programs)
        return Division(*[each.tolist() for each in shared])
    weights = [n and n + SPAN for n in keys]
    size = _span(sum(weights), max(weights, default=0), JOIN, programs)
    rest = size // REST  # in whole numbers, which every step counts with for each row
    used = [min(-((rest - n) // size) or 1, -(-few // SPAN)) if n else 0 for n, few in zip(weights, keys, strict=True)]
    return Division(used, [row for row, spans in enumerate(used) for _ in range(spans)])


def shared_out(keys: NDArray[np.int64], most: int, programs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same as arrays for more rows than are joined apart, by their keys; they have up to `most` new tokens."""
    size = _span(int(keys.sum()), int(keys.max()), JOIN * most, programs)
    used = np.maximum(-((size // REST - keys) // size), keys > 0)
    return used, np.arange(len(keys)).repeat(used)


def _span(total: int, longest: int, joins: int, programs: int) -> int:
    """How many keys the spans of rows with so many of them shall have."""
    return ceil(max(1, total / programs, sqrt(joins * longest)) / SPAN) * SPAN


def joined_apart(rows: int) -> bool:
    """Whether the spans of so many rows are joined by programs of their own, and not by the last of a row's."""
    return rows <= APART


def most_spans(rows: int, programs: int) -> int:
    """How many spans so many rows have at most."""
    return programs + rows - 1


def programs(device: torch.device, kv_heads: int, rows: int) -> int:
    """How many spans of so many rows shall be worked on at a time, by a program for each key head."""
    return max(1, processors(device) * (1 if joined_apart(rows) else ROUNDS) // kv_heads)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
