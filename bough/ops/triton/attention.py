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

from bough.ops.ragged import Pages, Rows
from bough.ops.triton.plan import on_device

LOG2E = tl.constexpr(1.4426950408889634)
QUERIES = 8  # new tokens of a row, at most
SPAN = 64  # keys that are worth a program of their own
ROUNDS = 2  # programs for each processor: as many as run on it at a time
STAGES = 3
TILE = 65536  # bytes of keys and values that are read at a time: a processor holds two such tiles on their way


@triton.jit(do_not_specialize=["window", "span", "spans"])
def _spans(
    q, k, v, out, weights, table, firsts, starts, counts, history,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_stride,
    scale, softcap, window, span, spans,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, page_tokens: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr, alone: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    kv_head, here, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count, before = tl.load(starts + row), tl.load(counts + row), tl.load(history + row)
    low = tl.maximum(before - window + 1, 0) if windowed else 0
    begin = low + here * span
    end = tl.minimum(begin + span, before + count)
    if count == 0 or begin >= end:
        return
    m, ks, vs = tl.arange(0, block_m), tl.arange(0, block_k), tl.arange(0, block_v)
    place, present = before + m // group, m // group < count  # of each query
    entry = (start + m // group).to(tl.int64) * heads + kv_head * group + m % group
    at = (start + m // group).to(tl.int64) * q_token + (kv_head * group + m % group) * q_head
    query = tl.load(q + at[:, None] + ks[None, :], mask=present[:, None] & (ks < dk)[None, :], other=0.0)
    page_of_row = table + row * table_stride - tl.load(firsts + row)

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
    if alone:
        tl.store(out + entry[:, None] * dv + vs[None, :], said, mask=mask)
    else:
        slot = entry * spans + here
        tl.store(out + slot[:, None] * dv + vs[None, :], said, mask=mask)
        tl.store(weights + slot, top + tl.log2(total), mask=present)


@triton.jit(do_not_specialize=["window", "span", "spans"])
def _join(
    parts, weights, out, row_of, counts, history, window, span, spans,
    heads: tl.constexpr, dv: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row = tl.load(row_of + token)
    before = tl.load(history + row)
    keys = before + tl.load(counts + row) - (tl.maximum(before - window + 1, 0) if windowed else 0)
    used, vs = tl.cdiv(keys, span), tl.arange(0, block_v)
    top, total = -1e30, 0.0
    said = tl.zeros([block_v], tl.float32)
    entry = (token * heads + head) * spans
    for first in range(0, used, block_s):
        s = first + tl.arange(0, block_s)
        log = tl.load(weights + entry + s, mask=s < used, other=-float("inf"))
        part = tl.load(
            parts + (entry + s)[:, None] * dv + vs[None, :], mask=(s < used)[:, None] & (vs < dv)[None, :], other=0.0
        )
        above = tl.maximum(top, tl.max(log, 0))
        weight, fade = tl.exp2(log - above), tl.exp2(top - above)
        total = total * fade + tl.sum(weight, 0)
        said = said * fade + tl.sum(part * weight[:, None], 0)
        top = above
    tl.store(out + (token * heads + head) * dv + vs, said / total, mask=vs < dv)


@lru_cache(8)
def _indices(rows: Rows, first: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """For each row its first page number, first token, count and history; then each token's row."""
    starts = [sum(rows.counts[:row]) for row in range(len(rows.counts))]
    row_of = [row for row, count in enumerate(rows.counts) for _ in range(count)]
    return tuple(on_device([list(first), starts, list(rows.counts), list(rows.history), row_of], device))


def attention(
    q: Tensor,
    rows: Rows,
    *,
    scale: float,
    stored: Pages,
    window: int | None = None,
    softcap: float | None = None,
    span: int | None = None,
) -> Tensor:
    """The twin of ops.attention for rows of up to QUERIES new tokens, stored pages and no masks.

    A program reads `span` keys; graphs that are replayed with longer histories fix it.
    """
    (total, heads, dk), (_, page_tokens, kv_heads, dv) = q.shape, stored.v.shape
    k, v, group, most = stored.k, stored.v, heads // kv_heads, max(rows.counts, default=0)
    assert most <= QUERIES and q.stride(2) == k.stride(3) == v.stride(3) == stored.table.stride(1) == 1
    out = q.new_empty(total, heads, dv)
    if not total:
        return out
    first, start, count, history, row_of = _indices(rows, stored.first, q.device)
    reach = [_reach(n, h, window) for n, h in zip(rows.counts, rows.history, strict=True)]
    span = span or _span(sum(reach) * kv_heads, q.device)
    spans = -(-max(reach) // span)
    parts, weights = out, None
    if spans > 1:
        parts = torch.empty(total, heads, spans, dv, device=q.device)
        weights = torch.empty(total, heads, spans, device=q.device)
    block_m, block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (group * most, dk, dv))
    _spans[kv_heads, spans, len(rows.counts)](
        q, k, v, parts, weights, stored.table, first, start, count, history,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], stored.table.stride(0),
        scale, softcap or 0.0, window or 0, span, spans,
        heads=heads, group=group, dk=dk, dv=dv, page_tokens=page_tokens,
        block_m=block_m, block_n=_keys(block_k + block_v, k.dtype),
        block_k=block_k, block_v=block_v, windowed=window is not None, capped=softcap is not None, alone=spans == 1,
        stages=STAGES, num_warps=_warps(block_m * block_v, k.dtype),
    )  # fmt: skip
    if spans > 1:
        _join[heads, total](
            parts, weights, out, row_of, count, history, window or 0, span, spans,
            heads=heads, dv=dv, block_s=32, block_v=block_v, windowed=window is not None,
        )  # fmt: skip
    return out


def _reach(count: int, history: int, window: int | None) -> int:
    """How many keys a row's new tokens see between them."""
    if not count:
        return 0
    return history + count - (0 if window is None else max(0, history - window + 1))


def _span(keys: int, device: torch.device) -> int:
    """How many keys a program reads: few enough that all processors have work, enough to be worth a program."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return -(-keys // (processors * ROUNDS * SPAN)) * SPAN


def _keys(width: int, dtype: torch.dtype) -> int:
    """How many keys are read at a time, of so many numbers with their values."""
    fits = TILE // (width * dtype.itemsize)
    return max(16, min(128, 1 << (fits.bit_length() - 1)))


def _warps(carried: int, dtype: torch.dtype) -> int:
    """As many as can carry so many numbers in registers; products in float32 take more of these."""
    return min(16, max(4, carried * dtype.itemsize // 4096))
