# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention of a few new tokens a row over the pages of long histories.

A program reads one span of one row's keys for one key head, and answers all queries of that head: every key and value
is read once. What the spans of a row say is joined by a second launch, if there is more than one.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Pages, Rows, Spans
from bough.ops.spans import FEW, divided, programs
from bough.ops.triton.plan import on_device, shared_bytes
from bough.ops.triton.prefill import ASIDE, CARRIED, attention_long

LOG2E = tl.constexpr(1.4426950408889634)
STAGES = 3


@triton.jit(do_not_specialize=["window", "most"])
def _spans(
    q, k, v, out, parts, weights, table, starts, counts, history, offsets, firsts, used, row_of_span, sizes,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    scale, softcap, window, most,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, page_tokens: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    kv_head, here = tl.program_id(0), tl.program_id(1)
    row, m = tl.load(row_of_span + here), tl.program_id(2) * block_m + tl.arange(0, block_m)  # queries, by their heads
    if row < 0:
        return
    start, count, before = tl.load(starts + row), tl.load(counts + row), tl.load(history + row)
    size = tl.load(sizes)
    low = tl.maximum(before - window + 1, 0) if windowed else 0
    begin = low + (here - tl.load(firsts + row)) * size
    end = tl.minimum(begin + size, before + count)
    ks, vs = tl.arange(0, block_k), tl.arange(0, block_v)
    place, present = before + m // group, m // group < count  # of each query
    entry = (start + m // group).to(tl.int64) * heads + kv_head * group + m % group
    at = (start + m // group).to(tl.int64) * q_token + (kv_head * group + m % group) * q_head
    query = tl.load(q + at[:, None] + ks[None, :], mask=present[:, None] & (ks < dk)[None, :], other=0.0)
    page_of_row = table + tl.load(offsets + row)

    top = tl.full([block_m], -1e30, tl.float32)
    total = tl.zeros([block_m], tl.float32)
    said = tl.zeros([block_m, block_v], tl.float32)
    for first in tl.range(begin, end, block_n, num_stages=stages):
        token = first + tl.arange(0, block_n)
        inside = token < end
        page = tl.load(page_of_row + token // page_tokens, mask=inside, other=0).to(tl.int64)
        in_page = token % page_tokens
        of_k = page * k_page + in_page * k_token + kv_head * k_head
        of_v = page * v_page + in_page * v_token + kv_head * v_head
        key = tl.load(k + of_k[:, None] + ks[None, :], mask=inside[:, None] & (ks < dk)[None, :], other=0.0)
        value = tl.load(v + of_v[:, None] + vs[None, :], mask=inside[:, None] & (vs < dv)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if capped:
            score = softcap * (1 - 2 / (1 + tl.exp(2 * score / softcap)))
        seen = inside[None, :] & (token[None, :] <= place[:, None])
        if windowed:
            seen &= token[None, :] > place[:, None] - window
        score = tl.where(seen, score * LOG2E, -float("inf"))
        above = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - above[:, None])
        fade = tl.exp2(top - above)
        total = total * fade + tl.sum(weight, 1)
        said = tl.dot(weight.to(query.dtype), value.to(query.dtype), said * fade[:, None], input_precision="ieee")
        top = above
    said = said / tl.where(total > 0, total, 1.0)[:, None]
    mask = present[:, None] & (vs < dv)[None, :]
    if tl.load(used + row) == 1:
        tl.store(out + entry[:, None] * dv + vs[None, :], said, mask=mask)
    else:
        slot = ((here * most).to(tl.int64) + m // group) * heads + kv_head * group + m % group
        tl.store(parts + slot[:, None] * dv + vs[None, :], said, mask=mask)
        tl.store(weights + slot, top + tl.log2(total), mask=present)


@triton.jit(do_not_specialize=["most"])
def _join(
    parts, weights, out, row_of, starts, firsts, used, most,
    heads: tl.constexpr, dv: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_of + token)
    if row < 0:
        return
    spans = tl.load(used + row)
    if spans == 1:
        return
    first, vs = tl.load(firsts + row), tl.arange(0, block_v)
    top, total = -1e30, 0.0
    said = tl.zeros([block_v], tl.float32)
    entry = ((first * most + token - tl.load(starts + row)) * heads + head).to(tl.int64)
    for some in range(0, spans, block_s):
        s = some + tl.arange(0, block_s)
        slot = entry + s * (most * heads)
        log = tl.load(weights + slot, mask=s < spans, other=-float("inf"))
        part = tl.load(
            parts + slot[:, None] * dv + vs[None, :], mask=(s < spans)[:, None] & (vs < dv)[None, :], other=0.0
        )
        above = tl.maximum(top, tl.max(log, 0))
        weight, fade = tl.exp2(log - above), tl.exp2(top - above)
        total = total * fade + tl.sum(weight, 0)
        said = said * fade + tl.sum(part * weight[:, None], 0)
        top = above
    tl.store(out + (token * heads + head).to(tl.int64) * dv + vs, said / total, mask=vs < dv)


@lru_cache(8)
def _divided(rows: Rows, offset: tuple[int, ...], window: int | None, kv_heads: int, device: torch.device) -> Spans:
    parts = divided(rows.counts, rows.history, window, programs(device, kv_heads))
    starts = [sum(rows.counts[:row]) for row in range(len(rows.counts))]
    used = parts.used.tolist()
    row_of = [row if used[row] else -1 for row, count in enumerate(rows.counts) for _ in range(count)]
    firsts = [sum(used[:row]) for row in range(len(used))]
    lists = [starts, rows.counts, rows.history, offset, firsts, used, parts.row.tolist(), [parts.size], row_of]
    return Spans(*on_device([list(each) for each in lists], device))


def attention(
    q: Tensor,
    rows: Rows,
    *,
    scale: float,
    stored: Pages,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The twin of ops.attention for stored pages and no masks."""
    (total, heads, dk), (_, page_tokens, kv_heads, dv) = q.shape, stored.v.shape
    k, v, group = stored.k, stored.v, heads // kv_heads
    most = max((count for count in rows.counts if count <= FEW), default=0)
    assert q.stride(2) == k.stride(3) == v.stride(3) == 1
    out = q.new_empty(total, heads, dv)
    if long := tuple(row for row, count in enumerate(rows.counts) if count > FEW):
        attention_long(q, rows, stored, long, out, scale=scale, window=window, softcap=softcap)
    spans = stored.spans or _divided(rows, stored.offset, window, kv_heads, q.device)
    if not most or not len(spans.row):
        return out
    parts = torch.empty(len(spans.row), most, heads, dv, device=q.device)
    weights = torch.empty(len(spans.row), most, heads, device=q.device)
    queries, block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (group * most, dk, dv))
    shared = shared_bytes(q.device)
    carried = CARRIED // (2 if q.dtype == torch.float32 else 1)  # products in float32 take more registers
    block_m = max(16, min(queries, carried // block_v, power_below(shared // (3 * block_k * q.dtype.itemsize))))
    room = shared - ASIDE - block_m * block_k * q.dtype.itemsize
    block_n = power_below(room // ((STAGES - 1) * (block_k + block_v) * k.dtype.itemsize))
    _spans[kv_heads, len(spans.row), triton.cdiv(group * most, block_m)](
        q, k, v, out, parts, weights, stored.table, *spans[:8],
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        scale, softcap or 0.0, window or 0, most,
        heads=heads, group=group, dk=dk, dv=dv, page_tokens=page_tokens,
        block_m=block_m, block_n=max(16, min(128, block_n)),
        block_k=block_k, block_v=block_v, windowed=window is not None, capped=softcap is not None,
        stages=STAGES, num_warps=_warps(block_m * block_v, k.dtype),
    )  # fmt: skip
    _join[total, heads](
        parts, weights, out, spans.row_of, spans.start, spans.first, spans.used, most,
        heads=heads, dv=dv, block_s=32, block_v=block_v,
    )  # fmt: skip
    return out


def power_below(number: int) -> int:
    """The largest power of two that is not above."""
    return 1 << max(0, number.bit_length() - 1)


def _warps(carried: int, dtype: torch.dtype) -> int:
    """As many as can carry so many numbers in registers; products in float32 take more of these."""
    return min(16, max(4, carried * dtype.itemsize // 4096))
