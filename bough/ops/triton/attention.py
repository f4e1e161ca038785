# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention of a few new tokens a row over the pages of long histories.

A program reads one span of one row's keys for one key head, and answers all queries of that head: every key and value
is read once. Whichever of the spans of a row is done last joins what all of them say. Of few rows there are many spans
of each: to join them is work for many programs, and a launch of its own.

Steps before have written all keys but those of a step's own tokens. So in captured steps of few rows, programs ask for
their keys and values before they wait for the queries (follow.py). Only the last span of a row has keys of this step:
it waits first, and gets fewer. Other forwards may just have written what their rows call history: there all wait.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Pages, Rows, Spans
from bough.ops.spans import FEW, SPAN, divided, joined_apart, programs
from bough.ops.triton.activation import LOG2E, activated, gated
from bough.ops.triton.arrivals import COUNTED, arrivals, is_last
from bough.ops.triton.follow import follow, following, lead
from bough.ops.triton.numbers import number
from bough.ops.triton.plan import on_device, shared_bytes
from bough.ops.triton.prefill import ASIDE, CARRIED, attention_long
from bough.ops.triton.spare import with_spare

READ = 32768
JOINED = 8192  # numbers of parts that are read at a time
COLUMNS = 128  # that a program joins, where that is a launch of its own


class Cut(NamedTuple):
    """How a program reads its keys."""

    keys: int  # at a time
    stages: int
    warps: int


@triton.jit
def _pages(pages, first, low, end, page_tokens: tl.constexpr, block_n: tl.constexpr):
    """The page of each of the keys from `first` on, or the one page of all."""
    if page_tokens % block_n == 0:
        return number(pages + tl.minimum(first, end - 1) // page_tokens).to(tl.int64)
    else:
        return number(pages + _known(first, low, end, block_n) // page_tokens).to(tl.int64)


@triton.jit
def _known(first, low, end, block_n: tl.constexpr):
    """The keys from `first` on; in the place of those outside, others."""
    return tl.minimum(tl.maximum(first + tl.arange(0, block_n), low), end - 1)


@triton.jit
def _tile(rows, at, columns, inside, width: tl.constexpr, early: tl.constexpr):
    """Keys or values. Where all are asked for early, those outside are others, so that none need be left out.

    Of many rows they are more than the second-level cache holds, and better go first than what is used again.
    """
    place = rows + at[:, None] + columns[None, :]
    if not early:
        there = inside[:, None] & (columns < width)[None, :]
        return tl.load(place, mask=there, other=0.0, eviction_policy="evict_first")
    elif width < columns.shape[0]:
        return tl.load(place, mask=(columns < width)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _asked(q, at, present, ks, dk: tl.constexpr):
    return tl.load(q + at[:, None] + ks[None, :], mask=present[:, None] & (ks < dk)[None, :], other=0.0)


@triton.jit
def _scores(
    query, key, key_at, inside, place, scale, softcap, window, windowed: tl.constexpr, capped: tl.constexpr
):  # fmt: skip
    """As powers of 2; -inf where a query does not see a key."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if capped:
        score = softcap * (1 - 2 / (1 + tl.exp(2 * score / softcap)))
    seen = inside[None, :] & (key_at[None, :] <= place[:, None])
    if windowed:
        seen &= key_at[None, :] > place[:, None] - window
    return tl.where(seen, score * LOG2E, -float("inf"))


@triton.jit
def _put(said, out, opened, at, mask):
    """Stores what was seen, multiplied by a gate's sigmoid if it has one, rounded as ops.gated after attention is."""
    said = said.to(out.dtype.element_ty)
    if opened is not None:
        opened = activated(opened.to(tl.float32), "sigmoid").to(opened.dtype)
        said = (opened.to(tl.float32) * said.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + at, said, mask=mask)


@triton.jit
def _join(
    parts, weights, out, gate, slot, spans, step, begin, end, start, first_head, gate_token, gate_head,
    heads: tl.constexpr, group: tl.constexpr, dv: tl.constexpr, block_s: tl.constexpr, block_g: tl.constexpr,
    block_v: tl.constexpr,
):  # fmt: skip
    """Joins what the spans of a row say to its queries [begin, end), some at a time."""
    g, vs, rounds = tl.arange(0, block_g), tl.arange(0, block_v), tl.cdiv(spans, block_s)
    top, total = tl.full([block_g], -1e30, tl.float32), tl.zeros([block_g], tl.float32)
    said = tl.zeros([block_g, block_v], tl.float32)
    for turn in tl.range(0, tl.cdiv(end - begin, block_g) * rounds, num_stages=3):
        query, round = begin + turn // rounds * block_g + g, turn % rounds
        token, head, asked = query // group, first_head + query % group, query < end
        s = round * block_s + tl.arange(0, block_s)
        at = (slot + s.to(tl.int64) * step)[:, None] + (token * heads + head)[None, :]
        there = (s < spans)[:, None] & asked[None, :]
        log = tl.load(weights + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        mask = there[:, :, None] & (vs < dv)[None, None, :]
        part = tl.load(parts + at[:, :, None] * dv + vs[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        before = tl.where(round == 0, -1e30, top)
        top = tl.maximum(before, tl.max(log, 0))
        weight, fade = tl.exp2(log - top[None, :]), tl.where(round == 0, 0.0, tl.exp2(before - top))
        total = total * fade + tl.sum(weight, 0)
        said = said * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        entry = (start + token).to(tl.int64)
        out_at, gate_at = (entry * heads + head) * dv, entry * gate_token + head * gate_head
        mask = (asked & (round == rounds - 1))[:, None] & (vs < dv)[None, :]
        opened = gate
        if gate is not None:
            opened = tl.load(gate + gate_at[:, None] + vs[None, :], mask=mask, other=0.0)
        _put(said / total[:, None], out, opened, out_at[:, None] + vs[None, :], mask)


@triton.jit(do_not_specialize=["window", "most"])
def _spans(
    q, k, v, gate, out, parts, weights, arrived, table, starts, counts, history, offsets, firsts, used, row_of_span,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, gate_token, gate_head,
    scale, softcap, window, most,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, page_tokens: tl.constexpr,
    span: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    block_s: tl.constexpr, block_g: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, early: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    """If `early`, keys are asked for before queries are waited for, and the programs that join come to wait too."""
    lead(follows)
    kv_head, here, first_m = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block_m
    row = number(row_of_span + here)
    if row < 0:
        follow(follows)
        return
    start, count, before = number(starts + row), number(counts + row), number(history + row)
    at_span, spans = here - number(firsts + row), number(used + row)
    if first_m >= count * group:
        follow(follows)
        return
    low = tl.maximum(before - window + 1, 0) if windowed else 0
    base = low // span * span
    some = tl.cdiv(before + count - base, span)
    if early:
        some += 1  # which is not there: whoever has the last keys waits before it asks for any, and gets fewer
    begin = tl.maximum(base + at_span * some // spans * span, low // block_n * block_n)
    end = tl.minimum(base + (at_span + 1) * some // spans * span, before + count)
    pages = table + number(offsets + row)
    page = _pages(pages, begin, low, end, page_tokens, block_n)
    m, ks, vs = first_m + tl.arange(0, block_m), tl.arange(0, block_k), tl.arange(0, block_v)
    place, present = before + m // group, m // group < count  # of each query
    token, head = (start + m // group).to(tl.int64), kv_head * group + m % group
    at = token * q_token + head * q_head
    k += kv_head * k_head
    v += kv_head * v_head

    if early:
        query = tl.zeros([block_m, block_k], q.dtype.element_ty)
        if end > before:
            follow(follows)
    else:
        query = _asked(q, at, present, ks, dk)
    top = tl.full([block_m], -1e30, tl.float32)
    totals = tl.zeros([block_m, block_n], tl.float32)  # summed up once, at the end
    said = tl.zeros([block_m, block_v], tl.float32)
    for first in range(begin, end, block_n):
        key_at = first + tl.arange(0, block_n)
        inside = (key_at >= low) & (key_at < end)
        in_page = (_known(first, low, end, block_n) if early else key_at) % page_tokens
        of_k, of_v = page * k_page + in_page * k_token, page * v_page + in_page * v_token
        # A round early: while keys wait for their page in the same round, fewer of them are on their way.
        page = _pages(pages, first + block_n, low, end, page_tokens, block_n)
        key, value = _tile(k, of_k, ks, inside, dk, early), _tile(v, of_v, vs, inside, dv, early)
        if early and first == begin:  # all that can be on its way is
            follow(follows)
            query = _asked(q, at, present, ks, dk)
        score = _scores(query, key, key_at, inside, place, scale, softcap, window, windowed, capped)
        above = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - above[:, None])
        fade = tl.exp2(top - above)
        totals = totals * fade[:, None] + weight
        said = tl.dot(weight.to(query.dtype), value, said * fade[:, None], input_precision="ieee")
        top = above
    total = tl.sum(totals, 1)
    said = said / tl.where(total > 0, total, 1.0)[:, None]
    mask = present[:, None] & (vs < dv)[None, :]
    if spans == 1:
        at, gate_at = (token * heads + head) * dv, token * gate_token + head * gate_head
        opened = gate
        if gate is not None:
            opened = tl.load(gate + gate_at[:, None] + vs[None, :], mask=mask, other=0.0)
        _put(said, out, opened, at[:, None] + vs[None, :], mask)
    else:
        slot = ((here * most).to(tl.int64) + m // group) * heads + head
        tl.store(parts + slot[:, None] * dv + vs[None, :], said, mask=mask)
        tl.store(weights + slot, top + tl.log2(total), mask=present)
        counter = (row * tl.num_programs(0) + kv_head) * tl.num_programs(2) + tl.program_id(2)
        if arrived is not None and is_last(arrived + counter, spans):
            _join(
                parts, weights, out, gate, ((here - at_span) * most).to(tl.int64) * heads, spans, most * heads,
                first_m, tl.minimum(first_m + block_m, count * group), start, kv_head * group, gate_token, gate_head,
                heads, group, dv, block_s, block_g, block_v,
            )  # fmt: skip


@triton.jit(do_not_specialize=["most"])
def _joins(
    parts, weights, out, gate, starts, counts, firsts, used, gate_token, gate_head, most,
    heads: tl.constexpr, dv: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """Some columns of one query. Little code: a launch's instructions come from memory as its data does."""
    row, token, head = tl.program_id(0), tl.program_id(1), tl.program_id(2) // tl.cdiv(dv, block_v)
    vs = tl.program_id(2) % tl.cdiv(dv, block_v) * block_v + tl.arange(0, block_v)
    spans, count, inside = number(used + row), number(counts + row), vs < dv
    entry = (number(starts + row) + token).to(tl.int64)
    slot = (number(firsts + row) * most + token).to(tl.int64) * heads + head
    follow(follows)
    if (spans > 1) & (token < count):
        opened = gate
        if gate is not None:
            opened = tl.load(gate + entry * gate_token + head * gate_head + vs, mask=inside, other=0.0)
        top, total, said = -1e30, 0.0, tl.zeros([block_v], tl.float32)
        for some in tl.range(0, spans, block_s, num_stages=1):
            s = some + tl.arange(0, block_s)
            at = slot + s.to(tl.int64) * (most * heads)
            log = tl.load(weights + at, mask=s < spans, other=-float("inf"))
            mask = (s < spans)[:, None] & inside[None, :]
            part = tl.load(parts + at[:, None] * dv + vs[None, :], mask=mask, other=0.0)
            above = tl.maximum(top, tl.max(log, 0))
            weight, fade = tl.exp2(log - above), tl.exp2(top - above)
            total, said = total * fade + tl.sum(weight, 0), said * fade + tl.sum(part * weight[:, None], 0)
            top = above
        _put(said / total, out, opened, (entry * heads + head) * dv + vs, inside)


@lru_cache(8)
def _divided(rows: Rows, offset: tuple[int, ...], window: int | None, kv_heads: int, device: torch.device) -> Spans:
    parts = divided(rows.counts, rows.history, window, programs(device, kv_heads, len(rows.counts)))
    starts = [sum(rows.counts[:row]) for row in range(len(rows.counts))]
    firsts = [sum(parts.used[:row]) for row in range(len(parts.used))]
    lists = [starts, rows.counts, rows.history, offset, firsts, parts.used, parts.row]
    return Spans(*on_device([list(each) for each in lists], device))


def attention(
    q: Tensor,
    rows: Rows,
    *,
    scale: float,
    stored: Pages,
    window: int | None = None,
    softcap: float | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """The twin of ops.attention for stored pages and no masks."""
    out = with_spare(q, (*q.shape[:2], stored.v.shape[-1]))
    long = tuple(row for row, count in enumerate(rows.counts) if count > FEW)
    if long:
        attention_long(q, rows, stored, long, out, scale=scale, window=window, softcap=softcap)
    own = None if long else gate
    attention_short(q, rows, stored, out, own, scale=scale, window=window, softcap=softcap)
    return out if gate is None or not long else gated(gate, out, torch.sigmoid)


def attention_short(
    q: Tensor,
    rows: Rows,
    stored: Pages,
    out: Tensor,
    gate: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """What ops.attention gives for rows of up to FEW tokens, into `out` [T, H, v_dim]."""
    (_, heads, dk), (_, page_tokens, kv_heads, dv) = q.shape, stored.v.shape
    k, v, group = stored.k, stored.v, heads // kv_heads
    most = max((count for count in rows.counts if count <= FEW), default=0)
    spans = stored.spans or _divided(rows, stored.offset, window, kv_heads, q.device)
    if not most or not len(spans.row):
        return
    assert k.dtype == v.dtype == q.dtype and q.stride(2) == k.stride(3) == v.stride(3) == 1
    assert gate is None or gate.stride(2) == 1
    parts = torch.empty(len(spans.row), most, heads, dv, device=q.device)
    weights = torch.empty(len(spans.row), most, heads, device=q.device)
    queries, block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (group * most, dk, dv))
    block_m = _queries(queries, block_k, block_v, q.dtype, q.device)
    apart, blocks = joined_apart(len(rows.counts)), triton.cdiv(group * most, block_m)
    ahead = _ahead(block_m, block_k, block_v, q.dtype, q.device) if apart else None
    cut = ahead or _cut(block_m, block_k, block_v, q.dtype, q.device)
    early = ahead is not None and stored.spans is not None
    follows = following(q.device) if early else {"follows": False}
    block_g, join_v = min(triton.next_power_of_2(group), JOINED // block_v), min(block_v, COLUMNS)
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]
    assert len(rows.counts) * kv_heads * blocks <= COUNTED
    _spans[kv_heads, len(spans.row), blocks](
        q, k, v, gate, out, parts, weights, None if apart else arrivals(q.device), stored.table, *spans,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *gate_strides,
        scale, softcap or 0.0, window or 0, most,
        heads=heads, group=group, dk=dk, dv=dv, page_tokens=page_tokens, span=SPAN,
        block_m=block_m, block_n=cut.keys, block_k=block_k, block_v=block_v,
        block_s=JOINED // (block_g * block_v), block_g=block_g,
        windowed=window is not None, capped=softcap is not None, early=early, num_stages=cut.stages,
        num_warps=cut.warps, **follows,
    )  # fmt: skip
    if apart:
        _joins[len(rows.counts), most, heads * triton.cdiv(dv, join_v)](
            parts, weights, out, gate, spans.start, spans.tokens, spans.first, spans.used, *gate_strides, most,
            heads=heads, dv=dv, block_s=JOINED // join_v, block_v=join_v, **follows,
        )  # fmt: skip


def _queries(queries: int, block_k: int, block_v: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many are answered together: as many as there are, and as fit in registers and in shared memory."""
    carried = CARRIED // (2 if dtype == torch.float32 else 1)  # products in float32 take more registers
    return max(
        16, min(queries, carried // block_v, power_below(shared_bytes(device) // (3 * block_k * dtype.itemsize)))
    )


def _cut(block_m: int, block_k: int, block_v: int, dtype: torch.dtype, device: torch.device) -> Cut:
    """READ bytes of keys and values at a time, and others on their way, where a processor can run two such programs."""
    each, queries = (block_k + block_v) * dtype.itemsize, block_m * block_k * dtype.itemsize
    keys = max(16, min(SPAN, power_below(READ // each)))
    beside = block_m < 64  # of more queries, the matrix units are still reading while others come in
    half, whole = (
        (shared - ASIDE - queries) // (keys * each) + beside
        for shared in (shared_bytes(device) // 2, shared_bytes(device))
    )
    return Cut(keys, max(2, min(4, half if half > 2 else whole)), _warps(block_m * block_v, dtype))


def _ahead(block_m: int, block_k: int, block_v: int, dtype: torch.dtype, device: torch.device) -> Cut | None:
    """Of few rows: SPAN keys at a time, with all that a span of twice as many has on their way, where that fits."""
    each, queries = (block_k + block_v) * dtype.itemsize, block_m * block_k * dtype.itemsize
    fits = block_m < 64 and 2 * SPAN * each + queries + ASIDE <= shared_bytes(device)
    return Cut(SPAN, 3, max(8, _warps(block_m * block_v, dtype))) if fits else None


def power_below(number: int) -> int:
    """The largest power of two that is not above."""
    return 1 << max(0, number.bit_length() - 1)


def _warps(carried: int, dtype: torch.dtype) -> int:
    """As many as can carry so many numbers in registers; products in float32 take more of these."""
    return min(16, max(4, carried * dtype.itemsize // 4096))
