"""The rows of a forward as kernels read them: small index tensors on the device, made once and used by all layers.

Rows of up to `SHORT` tokens without cuts take the kernels that carry a state through single tokens (decoding, drafts);
all others take the chunked ones, as pieces: what lies between two cuts of a row. At the end of a piece its state goes
to a slot, so a cut costs a store. A slot of −1 is none: a row that reads none starts from zeros, and one whose inputs
are recorded writes none.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import driver

from bough.ops.ragged import Rows, ShortRows, Slots

SHORT = 8
NONE = -1
ALIGN = 4  # numbers: 16 bytes
Ints = NDArray[np.integer]


class Long(NamedTuple):
    """Rows that are worked off in chunks."""

    read: Tensor  # [R] int32: slots
    pieces: Tensor  # [R + 1] int32: row r has the pieces [pieces[r], pieces[r + 1])
    start: Tensor  # [pieces] int32: tokens
    end: Tensor
    slot: Tensor  # [pieces] int32: where the state at its end goes
    first_chunk: Tensor  # [pieces] int32
    chunk_start: Tensor  # [chunks] int32: tokens
    chunk_count: Tensor
    chunk_row: Tensor


class Plan(NamedTuple):
    short: ShortRows
    long: Long


def plan(rows: Rows, slots: Slots, chunk: int) -> Plan:
    """The plan of a forward whose chunks have `chunk` tokens; all its layers run on the stream of the first."""
    if slots.short is not None:
        return Plan(slots.short, _none(slots.data.device))
    read = tuple(NONE if row in slots.fresh else slot for row, slot in enumerate(slots.read))
    recorded = slots.recorded or (False,) * len(read)
    write = tuple(NONE if each else slot for each, slot in zip(recorded, slots.write, strict=True))
    return _plan(rows, read, write, slots.cut, chunk, slots.data.device)


@lru_cache(8)
def _plan(
    rows: Rows,
    read: tuple[int, ...],
    write: tuple[int, ...],
    cut: tuple[tuple[int, ...], ...],
    chunk: int,
    device: torch.device,
) -> Plan:
    short: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    sources, ends = [], [0]
    for row, start, end in rows:
        cuts = rows.cuts_of(row)
        if (end - start <= SHORT or write[row] == NONE) and not cuts:
            short.append((start, end - start, read[row], write[row]))
            continue
        slot_at = dict(zip(cuts, cut[row] if cut else (), strict=True))
        sources.append(read[row])
        first = 0
        for last in sorted({*cuts, end - start}):
            pieces.append((len(ends) - 1, start + first, start + last, slot_at.get(last, NONE)))
            first = last
        if (end - start) in slot_at:  # both the cut and the row's own slot hold the state at its end
            pieces.append((len(ends) - 1, end, end, NONE))
        pieces[-1] = (*pieces[-1][:3], write[row])
        ends.append(len(pieces))
    owners, begins, lasts, slots = _columns(pieces)
    chunks = _chunks(owners, begins, lasts, chunk)
    tensors = on_device([*_columns(short), sources, ends, begins, lasts, slots, *chunks], device)
    return Plan(ShortRows(*tensors[:4]), Long(*tensors[4:]))


@cache
def _none(device: torch.device) -> Long:
    """No rows."""
    return _plan(Rows((), ()), (), (), (), 1, device).long


def _columns(table: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
    """Those of a table of fours."""
    return np.array(table, np.int32).reshape(-1, 4).T


def _chunks(row: Ints, start: Ints, end: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The first chunk of each piece; and of all chunks their first tokens, how many these are, and their rows."""
    counts = -(-(end - start) // size)
    first = np.cumsum(counts) - counts
    token = np.repeat(start - first * size, counts) + np.arange(counts.sum()) * size
    return first, token, np.minimum(size, np.repeat(end, counts) - token), np.repeat(row, counts)


@cache
def shared_bytes(device: torch.device) -> int:
    """Memory that the threads of a program share, at the most; that of a Hopper where there is no device."""
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def on_device(parts: Sequence[Sequence[int] | Ints], device: torch.device) -> Sequence[Tensor]:
    """Lists of numbers as int32 tensors, sent in one copy. Each is aligned, so that kernels are compiled once."""
    sizes = [size for part in parts for size in (len(part), -len(part) % ALIGN)]
    packed = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers, at = packed.numpy(), 0
    for part in parts:
        numbers[at : at + len(part)] = part
        at += -(-len(part) // ALIGN) * ALIGN
    return packed.to(device, non_blocking=True).split(sizes)[::2]
