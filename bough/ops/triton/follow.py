# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launches that begin while the one before is still at work.

A step of few rows is a row of short products, and each of them would have memory idle while its programs begin and its
first weights come. So a product says when the launch after it may begin (`lead`), loads what nothing before it writes,
and only then waits for all that came before (`follow`). Every kernel that is launched so does both: who waits for the
launch before it has then waited for all of them. Kernels between products are short, and launched as ever: for them it
does not pay.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def lead(follows: tl.constexpr):
    """From here on the next launch may take what room there is on the processors."""
    if follows:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def follow(follows: tl.constexpr):
    """From here on all that the launches before have written is there."""
    if follows:
        tl.extra.cuda.gdc_wait()


@cache
def following(device: torch.device) -> dict[str, bool]:
    """What kernels that lead and follow are launched with."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"follows": True, "launch_pdl": True}
    return {"follows": False}
