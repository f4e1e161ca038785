"""What keys and queries see of states, where there are many rows (look.cu): what `_look` of seen.py does for few.

In CUDA C++, since what Triton has come through shared memory gets in its threads' way: it took longer than without.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor
from triton import cdiv

from bough.ops.ragged import OWED, Owed, ShortRows
from bough.ops.spans import processors
from bough.ops.triton.native import Kernel, able, kernel, with_defined

PIECE = 32  # rows of a state that come at once
RING, BLOCKS = 2, 3  # pieces of a block that are there or on their way, and blocks on a processor
OLD_STEP = 80  # bytes from one recorded key to the next: four that are read at a time lie in different banks


def look(
    q: Tensor, k: Tensor, seen: Tensor, states: Tensor, rows: ShortRows, kept: tuple[Tensor, ...], owed: Owed
) -> bool:
    """Fills seen [rows, heads, 1, 2 · each, dv], and stores states where they are to be kept. False: not for these."""
    (_, heads, dk, dv), (count, *_, vectors, _) = states.shape, seen.shape
    made = _kernel(heads, heads // k.shape[1], dk, dv, vectors // 2, k.device) if _is_able(q, k, states) else None
    if made is None:
        return False
    tensors = seen, *kept, states, rows.start, rows.tokens, rows.read, owed.start, owed.tokens, owed.keep
    to_q = (q.data_ptr() - k.data_ptr()) // k.element_size()
    fields = [k.data_ptr(), to_q, *(each.data_ptr() for each in tensors), *(each.stride(0) for each in (q, k, states))]
    told = (ctypes.c_int64 * len(fields))(*fields), ctypes.c_int(heads * count)
    made.launch(min(heads * count, BLOCKS * processors(k.device)), dv, told)
    return True


def _is_able(q: Tensor, k: Tensor, states: Tensor) -> bool:
    (dk, dv), alike = states.shape[2:], k.dtype == torch.bfloat16 and states.dtype == torch.float32
    laid_out = q.stride(0) % 8 == k.stride(0) % 8 == states.stride(0) % 4 == 0
    aligned = all(each.data_ptr() % 16 == 0 for each in (q, k, states))
    fits = dk % (RING * PIECE) == dv % 32 == 0 and dv <= 128
    return alike and laid_out and aligned and fits and able(k.device)


def source(heads: int, group: int, dk: int, dv: int, each: int) -> str:
    shape = {"HEADS": heads, "GROUP": group, "DK": dk, "DV": dv, "EACH": each}
    fixed = {"OWED": OWED, "PIECE": PIECE, "RING": RING, "OLD_STEP": OLD_STEP, "BLOCKS": BLOCKS}
    return with_defined("look", shape | fixed)


@cache
def _kernel(heads: int, group: int, dk: int, dv: int, each: int, device: torch.device) -> Kernel | None:
    slot = PIECE * dv * 4 + OWED * OLD_STEP + cdiv(2 * each, 8) * 8 * PIECE * 2
    return kernel("look", source(heads, group, dk, dv, each), RING * slot + OWED * (dv + 1) * 4, device)
