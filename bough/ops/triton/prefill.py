# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention of long rows over pages: prompts, and their parts after a history.

A program answers a block of a row's new tokens for the heads that share a key head, and reads the keys these see from
their pages. Where there are fewer such blocks than processors (a few tokens after a long history), the keys of a block
are shared out among several programs, and a second launch joins what they say. Rows that the library's own kernels
serve as well are left to them (library.py).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Pages, Rows
from bough.ops.spans import processors
from bough.ops.triton.activation import LOG2E
from bough.ops.triton.library import by_library, gathered, is_served
from bough.ops.triton.plan import on_device, shared_bytes

PACK = 16  # heads of a block, at most
JOINED = 16  # queries that a program joins
UNEVEN = 2  # times its share of all keys, up to which a block is left to one program


class Tile(NamedTuple):
    """How many queries (heads of tokens) a program answers and how many keys it reads at a time, and with what."""

    queries: int
    keys: int
    warps: int
    stages: int  # three, to have the next keys on their way: their pages have to be looked up before


TILES = {  # by the bytes of a number; products in float32 take many registers
    2: (Tile(128, 64, 8, 3), Tile(64, 32, 8, 3), Tile(64, 32, 4, 2), Tile(32, 16, 4, 2)),
    4: (Tile(32, 16, 8, 2), Tile(16, 16, 4, 2)),
}
CARRIED = 32768  # numbers that a program carries in registers
ASIDE = 8192  # bytes of shared memory that are left for the rest


class Work(NamedTuple):
    """What the programs do, the longest first: int32, one number for each."""

    token: Tensor  # the first of its block
    tokens: Tensor
    place: Tensor  # the position of that token in its row
    pages: Tensor  # where in the table the row's page 0 is
    begin: Tensor  # keys, as positions in the row
    end: Tensor
    part: Tensor  # where what it says is kept to be joined; −1: nowhere, it is all there is


class Joins(NamedTuple):
    """The blocks whose keys were shared out: int32, one number for each."""

    token: Tensor
    tokens: Tensor
    part: Tensor  # its first
    parts: Tensor


@triton.jit
def _entries(
    data, page, at, inside, by_page, by_token, width: tl.constexpr, block: tl.constexpr, partial: tl.constexpr
):
    column = tl.arange(0, block)
    entry = data + (page * by_page + at * by_token)[:, None] + column[None, :]
    if partial or width != block:
        return tl.load(entry, mask=inside[:, None] & (column < width)[None, :], other=0.0)
    else:
        return tl.load(entry)


@triton.jit
def _fold(
    top, total, said, query, place, first, end, k, v, pages, k_page, k_token, v_page, v_token, factor, inner, window,
    dk: tl.constexpr, dv: tl.constexpr, page_tokens: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    block_v: tl.constexpr, edge: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    token = first + tl.arange(0, block_n)
    inside = token < end
    page = tl.load(pages + token // page_tokens, mask=inside, other=0).to(tl.int64)
    key = _entries(k, page, token % page_tokens, inside, k_page, k_token, dk, block_k, edge)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if capped:
        score = 1 - 2 / (1 + tl.exp2(score * inner))
    if edge:
        seen = inside[None, :] & (token[None, :] <= place[:, None])
        if windowed:
            seen &= token[None, :] > place[:, None] - window
        score = tl.where(seen, score, -float("inf"))
    above = tl.maximum(top, tl.max(score, 1) * factor)
    weight = tl.exp2(score * factor - above[:, None])
    fade = tl.exp2(top - above)
    value = _entries(v, page, token % page_tokens, inside, v_page, v_token, dv, block_v, edge)
    said = tl.dot(weight.to(value.dtype), value, said * fade[:, None], input_precision="ieee")
    return above, total * fade + tl.sum(weight, 1), said


@triton.jit(do_not_specialize=["window"])
def _blocks(
    q, k, v, out, parts, weights, table,
    token_of, tokens_of, place_of, pages_of, begin_of, end_of, part_of,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head,
    factor, inner, window,
    packs: tl.constexpr, pack: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    page_tokens: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    block_v: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    work, heads = tl.program_id(0) // packs, tl.program_id(0) % packs
    token, tokens, first_place = tl.load(token_of + work), tl.load(tokens_of + work), tl.load(place_of + work)
    begin, end, part = tl.load(begin_of + work), tl.load(end_of + work), tl.load(part_of + work)
    m, ks, vs = tl.arange(0, block_m), tl.arange(0, block_k), tl.arange(0, block_v)
    head, place, present = heads * pack + m % pack, first_place + m // pack, m // pack < tokens
    entry = (token + m // pack).to(tl.int64)
    query = tl.load(
        q + (entry * q_token + head * q_head)[:, None] + ks[None, :],
        mask=present[:, None] & (ks < dk)[None, :], other=0.0,
    )  # fmt: skip
    kv_head, pages = heads * pack // group, table + tl.load(pages_of + work)
    k += kv_head * k_head
    v += kv_head * v_head

    # All queries see the keys of [low, high). What lies before and after is looked at key by key.
    low = tl.minimum(tl.maximum(begin, first_place + tokens - window), end) if windowed else begin
    before = tl.cdiv(low - begin, block_n)
    low = begin + before * block_n
    high = low + tl.maximum(tl.minimum(first_place + 1, end) - low, 0) // block_n * block_n
    edges = before + tl.cdiv(tl.maximum(end - high, 0), block_n)

    top = tl.full([block_m], -1e30, tl.float32)
    total = tl.zeros([block_m], tl.float32)
    said = tl.zeros([block_m, block_v], tl.float32)
    for edge in tl.range(0, edges, num_stages=stages):
        first = tl.where(edge < before, begin, high - before * block_n) + edge * block_n
        top, total, said = _fold(
            top, total, said, query, place, first, end, k, v, pages, k_page, k_token, v_page, v_token,
            factor, inner, window, dk, dv, page_tokens, block_n, block_k, block_v, True, windowed, capped,
        )  # fmt: skip
    for first in tl.range(low, high, block_n, num_stages=stages):
        top, total, said = _fold(
            top, total, said, query, place, first, end, k, v, pages, k_page, k_token, v_page, v_token,
            factor, inner, window, dk, dv, page_tokens, block_n, block_k, block_v, False, windowed, capped,
        )  # fmt: skip
    said = said / tl.where(total > 0, total, 1.0)[:, None]

    mask = present[:, None] & (vs < dv)[None, :]
    if part < 0:
        tl.store(out + (entry * out_token + head * out_head)[:, None] + vs[None, :], said, mask=mask)
    else:
        slot = (part * packs + heads).to(tl.int64) * block_m + m
        tl.store(parts + slot[:, None] * dv + vs[None, :], said, mask=mask)
        tl.store(weights + slot, top + tl.log2(total), mask=present)


@triton.jit
def _join(
    parts, weights, out, token_of, tokens_of, part_of, parts_of, out_token, out_head,
    packs: tl.constexpr, pack: tl.constexpr, dv: tl.constexpr,
    block_m: tl.constexpr, joined: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    block, heads = tl.program_id(0) // packs, tl.program_id(0) % packs
    token, tokens = tl.load(token_of + block), tl.load(tokens_of + block)
    m, vs = tl.program_id(1) * joined + tl.arange(0, joined), tl.arange(0, block_v)
    present = m // pack < tokens
    mask = present[:, None] & (vs < dv)[None, :]
    slot = (tl.load(part_of + block) * packs + heads).to(tl.int64) * block_m + m
    top, total = tl.full([joined], -1e30, tl.float32), tl.zeros([joined], tl.float32)
    said = tl.zeros([joined, block_v], tl.float32)
    for _ in range(tl.load(parts_of + block)):
        log = tl.load(weights + slot, mask=present, other=0.0)
        part = tl.load(parts + slot[:, None] * dv + vs[None, :], mask=mask, other=0.0)
        above = tl.maximum(top, log)
        weight, fade = tl.exp2(log - above), tl.exp2(top - above)
        total = total * fade + weight
        said = said * fade[:, None] + part * weight[:, None]
        top = above
        slot += packs * block_m
    entry = (token + m // pack).to(tl.int64) * out_token + (heads * pack + m % pack) * out_head
    tl.store(out + entry[:, None] + vs[None, :], said / total[:, None], mask=mask)


def attention_long(
    q: Tensor,
    rows: Rows,
    stored: Pages,
    which: tuple[int, ...],
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """What ops.attention gives for the rows `which`, over stored pages and without masks, into `out` [T, H, v_dim]."""
    own = tuple(row for row in which if not is_served(q, rows, stored, row, window, softcap))
    if own:
        tile = tile_of(max(q.shape[-1], out.shape[-1]), q.dtype, q.device)
        over_pages(q, rows, stored, own, out, tile, scale=scale, window=window, softcap=softcap)
    for row, start, end in rows:
        if row in which and row not in own:
            k, v = gathered(stored, row, rows.history[row] + rows.counts[row])
            by_library(q[start:end], k, v, out[start:end], scale)


def over_pages(
    q: Tensor,
    rows: Rows,
    stored: Pages,
    which: tuple[int, ...],
    out: Tensor,
    tile: Tile,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """The rows `which`, worked off in tiles."""
    (_, heads, dk), (_, page_tokens, kv_heads, dv) = q.shape, stored.v.shape
    k, v, group = stored.k, stored.v, heads // kv_heads
    assert k.dtype == v.dtype == q.dtype and scale > 0
    assert q.stride(2) == k.stride(3) == v.stride(3) == out.stride(2) == stored.table.stride(0) == 1
    pack = max(size for size in range(1, PACK + 1) if group % size == 0)
    packs, block_m = heads // pack, tile.queries
    block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (dk, dv))
    work, joins, slots = _work(rows, stored.offset, which, window, block_m // pack, tile.keys, packs, q.device)
    parts = torch.empty(slots, packs, block_m, dv, device=q.device)
    weights = torch.empty(slots, packs, block_m, device=q.device)
    inner, factor = (0.0, scale) if softcap is None else (2 * scale / softcap, softcap)
    _blocks[(len(work.token) * packs,)](
        q, k, v, out, parts, weights, stored.table, *work,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
        factor * LOG2E.value, inner * LOG2E.value, window or 0,
        packs=packs, pack=pack, group=group, dk=dk, dv=dv, page_tokens=page_tokens,
        block_m=block_m, block_n=tile.keys, block_k=block_k, block_v=block_v,
        windowed=window is not None, capped=softcap is not None, stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if slots:
        _join[len(joins.token) * packs, block_m // JOINED](
            parts, weights, out, *joins, *out.stride()[:2],
            packs=packs, pack=pack, dv=dv, block_m=block_m, joined=JOINED, block_v=block_v,
        )  # fmt: skip


def tile_of(width: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The largest tile that fits: its answers in half of the registers, its queries and keys in shared memory."""
    return next(
        (tile for tile in TILES[dtype.itemsize] if _fits(tile, width, dtype, device)), TILES[dtype.itemsize][-1]
    )


def _fits(tile: Tile, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    width = max(16, triton.next_power_of_2(width))
    numbers = width * (tile.queries + 2 * (tile.stages - 1) * tile.keys)
    return tile.queries * width <= CARRIED and numbers * dtype.itemsize + ASIDE <= shared_bytes(device)


@lru_cache(8)
def _work(
    rows: Rows,
    offset: tuple[int, ...],
    which: tuple[int, ...],
    window: int | None,
    size: int,
    step: int,
    packs: int,
    device: torch.device,
) -> tuple[Work, Joins, int]:
    """Blocks of `size` tokens for programs that read `step` keys at a time; what they do, and how many parts there are.

    All layers of a forward share it, so they run on the stream of the first.
    """
    blocks = []
    for row, start, end in rows:
        for token in range(start, end, size) if row in which else ():
            place, tokens = rows.history[row] + token - start, min(size, end - token)
            low = 0 if window is None else max(0, place - window + 1)
            blocks.append((token, tokens, place, offset[row], low, place + tokens))
    share = -(-sum(end - low for *_, low, end in blocks) * packs // (processors(device) * step)) * step
    work: list[tuple[int, ...]] = []
    joins: list[tuple[int, ...]] = []
    slots = 0
    for *block, low, end in blocks:
        if end - low <= UNEVEN * share:
            work.append((*block, low, end, -1))
            continue
        cuts = range(low, end, share)
        work += [(*block, cut, min(cut + share, end), slots + part) for part, cut in enumerate(cuts)]
        joins.append((*block[:2], slots, len(cuts)))
        slots += len(cuts)
    work.sort(key=lambda each: each[4] - each[5])
    tables = [[each[column] for each in table] for table, width in ((work, 7), (joins, 4)) for column in range(width)]
    sent = on_device(tables, device)
    return Work(*sent[:7]), Joins(*sent[7:]), slots
