# mypy: allow-untyped-defs, allow-incomplete-defs
"""Programs that do parts of one thing: whichever is done last puts together what all of them wrote down.

It reads all parts, its own too, in one order, so that results do not depend on timing.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

COUNTED = 1 << 16  # things that a launch does in parts, at most


@triton.jit
def is_last(arrived, parts):
    """Whether all parts have been stored, now that this program's are. They are read past a processor's own cache."""
    tl.debug_barrier()  # all of the program's warps have stored before it says so
    last = tl.atomic_add(arrived, 1) == parts - 1
    if last:
        tl.store(arrived, 0)  # as the next launch needs it
    return last


def arrivals(device: torch.device) -> Tensor:
    """How many parts of each thing have been stored: none, between launches. Each stream has its own."""
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "a graph would keep what is shared"
    return torch.zeros(COUNTED, dtype=torch.int32, device=device)
