"""Rows to spare: a library makes products of some numbers of rows badly, and of a few more rows well.

So what products take is made with room for those behind it, where it would be of such a number. What lies there is
anything, and so are the rows that a product makes of it; nobody looks at either.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

BAD, GOOD = range(289, 328), 328  # rows: gate and up of the 4 B shape take cuBLAS 69 µs for 320, and 50 for 328
OUTPUTS = 1 << 16  # from which on as many rows as there are take least


def with_spare(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor of this shape, of which rows are to spare if that is of use."""
    rows, *others = shape
    return like.new_empty(GOOD if rows in BAD else rows, *others)[:rows]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The twin of ops.linear, by torch's own."""
    if len(x) not in BAD or len(weight) > OUTPUTS:
        return F.linear(x, weight, bias)
    rows, width = x.shape
    end = x.storage_offset() + GOOD * x.stride(0)
    has_spare = x.stride(1) == 1 and x.stride(0) >= width and end * x.element_size() <= x.untyped_storage().nbytes()
    return F.linear(x.as_strided((GOOD, width), x.stride()) if has_spare else x, weight, bias)[:rows]
