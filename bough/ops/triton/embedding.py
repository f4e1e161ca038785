# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows of a table. The library takes 13 µs for the embeddings of 16 tokens, which are 80 KiB."""

import triton
import triton.language as tl
from torch import Tensor

from bough.ops.triton.follow import SHORT, following, lead

BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _rows(
    tokens, table, out, row_stride, column_stride, width: tl.constexpr, block: tl.constexpr, follows: tl.constexpr
):  # fmt: skip
    lead(follows)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    source = tl.load(tokens + row).to(tl.int64) * row_stride
    value = tl.load(table + source + column.to(tl.int64) * column_stride, mask=column < width)
    tl.store(out + row * width + column, value, mask=column < width)


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """The twin of ops.embedding."""
    width, tokens = table.shape[1], tokens.contiguous()
    out, block = table.new_empty(len(tokens), width), min(BLOCK, triton.next_power_of_2(width))
    if len(tokens):
        _rows[len(tokens), triton.cdiv(width, block)](
            tokens, table, out, *table.stride(), width=width, block=block, num_warps=max(1, min(8, block // 256)),
            follows=len(tokens) <= SHORT and following(table.device)["follows"],  # it waits for all before
        )  # fmt: skip
    return out
