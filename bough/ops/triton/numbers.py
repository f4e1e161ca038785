# mypy: allow-untyped-defs, allow-incomplete-defs
"""The numbers of a step, as kernels read them."""

import triton
import triton.language as tl


@triton.jit
def number(place):
    """All layers read the same ones: they are to stay in the second-level cache, while weights go by."""
    return tl.load(place, eviction_policy="evict_last")
