"""How the keys of rows of a few tokens are divided among programs, so that all processors of a device have work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FEW = 9  # new tokens of a row, up to which its queries are answered together
SPAN = 64  # keys that are worth a program of their own
ROUNDS = 2  # programs for each processor: as many as run on it at a time


@dataclass(frozen=True, slots=True)
class Division:
    """Rows and their spans, on the host."""

    size: int  # keys in a span
    used: Ints  # [R]: spans of each row
    row: Ints  # [N]: the row of each span


def divided(counts: Sequence[int], history: Sequence[int], window: int | None, programs: int) -> Division:
    """Spans of one size for rows of 1 to FEW new tokens, about as many as there shall be programs; others get none."""
    count, before = np.asarray(counts, np.int64), np.asarray(history, np.int64)
    low = 0 if window is None else np.maximum(0, before - window + 1)
    keys = np.where((count > 0) & (count <= FEW), before + count - low, 0)
    size = max(1, -(-int(keys.sum()) // (programs * SPAN))) * SPAN
    used = -(-keys // size)
    return Division(size, used, np.repeat(np.arange(len(used)), used))


def most_spans(rows: int, programs: int) -> int:
    """How many spans so many rows have at most."""
    return programs + rows


def programs(device: torch.device, kv_heads: int) -> int:
    """How many spans shall be worked on at a time, by a program for each key head."""
    return max(1, processors(device) * ROUNDS // kv_heads)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
