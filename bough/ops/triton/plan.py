"""The rows of a forward as kernels read them: small index tensors on the device, made once and used by all layers.

Rows of up to `SHORT` tokens without cuts take the kernels that carry a state through single tokens (decoding, drafts);
all others take the chunked ones, as pieces: what lies between two cuts of a row. At the end of a piece its state goes
to a slot, so a cut costs a store. A slot of −1 is none: a row that reads none starts from zeros, and one whose inputs
are recorded writes none.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from bough.ops.ragged import Rows, ShortRows, Slots

SHORT = 8
NONE = -1
ALIGN = 4  # numbers: 16 bytes


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
    pieces: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int, int]] = []
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
            pieces.append((start + first, start + last, slot_at.get(last, NONE), len(chunks)))
            chunks += [(start + at, min(chunk, last - at), len(ends) - 1) for at in range(first, last, chunk)]
            first = last
        if (end - start) in slot_at:  # both the cut and the row's own slot hold the state at its end
            pieces.append((end, end, NONE, len(chunks)))
        pieces[-1] = (*pieces[-1][:2], write[row], pieces[-1][3])
        ends.append(len(pieces))
    starts, counts, reads, writes = _columns(short, 4)
    begins, lasts, slots, firsts = _columns(pieces, 4)
    parts = [starts, counts, reads, writes, sources, ends, begins, lasts, slots, firsts, *_columns(chunks, 3)]
    tensors = on_device(parts, device)
    return Plan(ShortRows(*tensors[:4]), Long(*tensors[4:]))


@cache
def _none(device: torch.device) -> Long:
    """No rows."""
    return _plan(Rows((), ()), (), (), (), 1, device).long


def _columns(table: Sequence[tuple[int, ...]], width: int) -> list[list[int]]:
    return [[entry[column] for entry in table] for column in range(width)]


@cache
def shared_bytes(device: torch.device) -> int:
    """Memory that the threads of a program share, at the most; that of a Hopper where there is no device."""
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def on_device(parts: list[list[int]], device: torch.device) -> list[Tensor]:
    """Lists of numbers as int32 tensors, sent in one copy. Each is aligned, so that kernels are compiled once."""
    places = [-(-len(part) // ALIGN) * ALIGN for part in parts]
    packed = torch.zeros(sum(places), dtype=torch.int32, pin_memory=device.type == "cuda")
    for part, place in zip(parts, packed.split(places), strict=True):
        place[: len(part)] = torch.tensor(part, dtype=torch.int32)
    sent = packed.to(device, non_blocking=True).split(places)
    return [place[: len(part)] for part, place in zip(parts, sent, strict=True)]
