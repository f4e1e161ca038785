# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launches that begin while the one before is still at work.

A step of few rows is a row of short products, and each of them would have memory idle while its programs begin and its
first weights come. So a product says when the launch after it may begin (`lead`), loads what nothing before it writes,
and only then waits for all that came before (`follow`). Every kernel that is launched so does both, in each of its
programs: who waits for the launch before it has then waited for all of them. What comes between products does the same
where there are few tokens: the delta rule and the convolution find their state as the step before left it, and every
step begins with a launch that waits for all before it (the embeddings); norms of heads have their weights; others load
nothing early (`pass_on`). So does attention of few rows with its keys; but it leads to nothing but the joining of its
spans, and that to nothing: products that wait beside them are in their way. Whatever the number of tokens, the sum and
norm between products lead, since wide.py asks for weights early too, and the convolution, since late.py asks for states
(neither of these leads to anything).
"""

from functools import cache

import torch
import triton
import triton.language as tl

SHORT = 8  # tokens, up to which what lies between products lets the next one begin


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


@triton.jit
def pass_on(follows: tl.constexpr):
    """Both, at the beginning of a kernel: programs of the next launch come to wait beside its own."""
    lead(follows)
    follow(follows)


def passing_on(device: torch.device, tokens: int) -> dict[str, bool]:
    """What kernels between products are launched with."""
    return following(device) if tokens <= SHORT else {"follows": False}


@cache
def following(device: torch.device) -> dict[str, bool]:
    """What kernels that lead and follow are launched with."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"follows": True, "launch_pdl": True}
    return {"follows": False}
