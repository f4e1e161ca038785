# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention of long rows by the library's own kernels, with what it takes to feed them.

The library is half as fast again as our kernel over pages, but plans anew for every size it has not seen, which takes
it longer than a prompt. So it is given blocks of one size, which are joined by what each weighs.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Pages, Rows
from bough.ops.triton.activation import LOG2E
from bough.ops.triton.norm import at

BLOCK = 8192  # tokens that the library is given at a time
JOINED = 4  # parts that are joined in one launch
TILE = 2048  # numbers that a program works on

Part = tuple[Tensor, Tensor]  # what some queries see of some keys [n, H, d], and the logarithm of its weight [H, n]


@triton.jit(do_not_specialize=["first"])
def _gather(k, v, out, table, first, k_page, v_page, size, tile: tl.constexpr):
    """A tile of one page's K and V, which go to the two halves of `out`."""
    page, number = tl.program_id(1), tl.program_id(0) * tile + tl.arange(0, tile)
    source, inside = tl.load(table + first + page).to(tl.int64), number < size
    key = tl.load(k + source * k_page + number, mask=inside)
    value = tl.load(v + source * v_page + number, mask=inside)
    out += page.to(tl.int64) * size + number
    tl.store(out, key, mask=inside)
    tl.store(out + tl.num_programs(1).to(tl.int64) * size, value, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _join(
    saids, logs, out, log, count, said_token, said_head, out_token, out_head,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """The mean of what parts say, by what they weigh; and the logarithm of the weight of all, if there is a `log`."""
    entry, column = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each), tl.arange(0, block)[None, :]
    of_log, present = entry % heads * count + entry // heads, entry < heads * count
    mask = present[:, None] & (column < width)
    parts: tl.tuple = ()
    weights: tl.tuple = ()
    top = tl.full([each], -float("inf"), tl.float32)
    for i in tl.static_range(len(saids)):
        parts += (tl.load(at(saids[i], entry[:, None], said_token, said_head, column, heads), mask=mask),)
        weights += (tl.load(logs[i] + of_log, mask=present, other=0.0),)
        top = tl.maximum(top, weights[i])
    mean, total = tl.zeros([each, block], tl.float32), tl.zeros([each], tl.float32)
    for i in tl.static_range(len(saids)):
        weight = tl.exp2((weights[i] - top) * LOG2E)
        total += weight
        mean += parts[i].to(tl.float32) * weight[:, None]
    tl.store(at(out, entry[:, None], out_token, out_head, column, heads), mean / total[:, None], mask=mask)
    if log is not None:
        tl.store(log + of_log, top + tl.log(total), mask=present)


def is_served(q: Tensor, rows: Rows, stored: Pages, row: int, window: int | None, softcap: float | None) -> bool:
    """Whether a row is left to the library: one that it does, and that is whole blocks after whole blocks."""
    count, keys = rows.counts[row], rows.history[row] + rows.counts[row]
    plain = softcap is None and (window is None or window >= keys) and stored.k.shape == stored.v.shape
    blocks = count % BLOCK == 0 and keys % BLOCK == 0 and q.is_cuda and q.dtype == torch.bfloat16
    return plain and blocks and _is_able(q.device, q.shape[1], stored.k.shape[2], q.shape[2])


@cache
def _is_able(device: torch.device, heads: int, kv_heads: int, width: int) -> bool:
    """Whether the library does such heads on this device."""
    q, k = (torch.zeros(16, n, width, dtype=torch.bfloat16, device=device) for n in (heads, kv_heads))
    try:
        _part(q, k, k, 1.0, causal=True)
    except RuntimeError:
        return False
    return True


def gathered(stored: Pages, row: int, keys: int) -> tuple[Tensor, Tensor]:
    """K and V of the row's first tokens, in their order: what Pages.span gives, in one launch."""
    k, v, (_, page_tokens, heads, width) = stored.k, stored.v, stored.k.shape
    size, pages = page_tokens * heads * width, triton.cdiv(keys, page_tokens)
    assert k.stride()[1:] == v.stride()[1:] == (heads * width, width, 1) and k.shape == v.shape
    both = k.new_empty(2, pages * page_tokens, heads, width)
    _gather[triton.cdiv(size, TILE), pages](
        k, v, both, stored.table, stored.offset[row], k.stride(0), v.stride(0), size, tile=TILE
    )
    return both[0, :keys], both[1, :keys]


def by_library(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """q [n, H, d] are the last n of the tokens of k and v [S, Hkv, d]: each block over itself and all before it."""
    history = len(k) - len(q)
    for first in range(0, len(q), BLOCK):
        some, here = q[first : first + BLOCK], history + first
        parts = [_part(some, k[here : here + BLOCK], v[here : here + BLOCK], scale, causal=True)]
        for before in range(0, here, BLOCK):
            if len(parts) == JOINED:
                so_far = torch.empty_like(parts[0][0], dtype=torch.float32), torch.empty_like(parts[0][1])
                _joined(parts, *so_far)
                parts = [so_far]
            parts.append(_part(some, k[before : before + BLOCK], v[before : before + BLOCK], scale, causal=False))
        _joined(parts, out[first : first + BLOCK], None)


def _part(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Part:
    """What a block of queries sees of a block of keys."""
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    out, log, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), log.reshape(q.shape[1:3])


def _joined(parts: list[Part], out: Tensor, log: Tensor | None) -> None:
    saids, logs = zip(*parts, strict=True)
    (count, heads, width), strides = out.shape, saids[0].stride()
    assert all(said.stride() == strides for said in saids) and strides[2] == out.stride(2) == 1
    assert all(each.is_contiguous() for each in logs)
    block = triton.next_power_of_2(width)
    each = max(1, TILE // block)
    _join[(triton.cdiv(count * heads, each),)](
        saids, logs, out, log, count, *strides[:2], *out.stride()[:2],
        heads=heads, width=width, block=block, each=each,
    )  # fmt: skip
