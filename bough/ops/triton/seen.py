# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule for rows of a few tokens whose slots lag behind: what tokens see of states, then what they say.

Such a row stores its state as it was before its tokens, if at all. With S for that state after what is owed, and d for
the decay from one token to another, a window's token t changes and says (q and k of unit length)
    change_t = β_t (v_t − d_t Sᵀk_t − Σ_s<t d_st (k_s·k_t) change_s)
    out_t    = d_t Sᵀq_t + Σ_s≤t d_st (k_s·q_t) change_s
so all that tokens need of S is what their keys and queries see of it: one launch reads states and finds that (`_look`),
another does the rest, which is little, and the norm after it (`_say`).

A program that looks is one warp and takes some columns of a head. What is owed is a product of keys and changes, and
what is seen one of the state and keys and queries: both are done by the matrix units over numbers that stay in the
registers they were loaded to (units.py). Of many rows a Hopper has states come to shared memory instead, and does all
of it in one launch (late.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.delta import DeltaLayer
from bough.ops.ragged import OWED, Owed, ShortRows
from bough.ops.triton.codes import has_ptx
from bough.ops.triton.follow import follow, lead, passing_on
from bough.ops.triton.gates import gates_of, length_of
from bough.ops.triton.late import Brought, advance
from bough.ops.triton.numbers import number
from bough.ops.triton.spare import with_spare
from bough.ops.triton.units import LANES, add_product, beside, four, parts

TURNS = tl.constexpr(OWED // 4)  # in which recorded tokens come, four at a time
COLUMNS = tl.constexpr(32)  # of a state, that a program takes
PIECE = tl.constexpr(32)  # its rows that come at once
BUSY = 512  # programs of whole columns, up to which they are divided further


@triton.jit
def _owed(decays, changes, tokens, inner, inside, dv: tl.constexpr, heads: tl.constexpr):
    """Of up to OWED recorded tokens: what is left of a state after them; and their changes, each decayed by those after
    it, as left factors of eight tokens at a time."""
    lane = tl.arange(0, LANES)
    own = tl.load(decays + lane * heads, mask=lane < tokens, other=0.0)
    after = tl.load(decays + (lane + 1) * heads, mask=lane + 1 < tokens, other=0.0)
    raw: tl.tuple = ()  # all of it is asked for before anything is waited for
    for turn in tl.static_range(TURNS):
        token = (turn * 4 + inner)[:, None]
        raw += (tl.load(changes + token * (heads * dv), mask=(token < tokens) & inside, other=0.0),)
    # Sums of their own: differences would lose the digits of weak decays.
    left = tl.exp(tl.cumsum(after, 0, reverse=True))
    made: tl.tuple = ()
    for turn in tl.static_range(TURNS):
        made += four(raw[turn] * tl.gather(left, turn * 4 + inner, 0)[:, None])
    return tl.exp(tl.sum(own, 0)), made


@triton.jit
def _of(numbers, at: tl.constexpr):
    return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]


@triton.jit
def _added(to, high, low, right, exact: tl.constexpr, ptx: tl.constexpr):
    """Adds the product of a left factor that is cut in two and a right one: that is whole, if `exact`, or cut too."""
    to = add_product(to, high, right, ptx)
    if not exact:
        to = add_product(to, high, (parts(right[0])[1], parts(right[1])[1]), ptx)
    return add_product(to, low, right, ptx)


@triton.jit
def _cut(first, second, third, fourth):
    h0, l0 = parts(first)
    h1, l1 = parts(second)
    h2, l2 = parts(third)
    h3, l3 = parts(fourth)
    return (h0, h1, h2, h3), (l0, l1, l2, l3)


@triton.jit
def _keys(keys, tokens, inner, in_key, k_step: tl.constexpr):
    """Recorded keys at the rows of a piece, of four tokens at a time."""
    asked: tl.tuple = ()
    for turn in tl.static_range(TURNS):
        token = turn * 4 + inner
        asked += (tl.load(keys + token[:, None] * k_step, mask=(token < tokens)[:, None] & in_key, other=0.0),)
    return asked


@triton.jit
def _moved(piece, keys, all_left, made, exact: tl.constexpr, ptx: tl.constexpr):
    """A piece of the state after what is owed."""
    right = _columns(keys, TURNS)  # of eight tokens at a time: the first four and the others
    zero = tl.zeros((LANES,), tl.float32)
    none = (zero, zero, zero, zero)
    sums: tl.tuple = ()
    for tile in tl.static_range(2):
        totals: tl.tuple = (none, none, none, none)
        for turn in tl.static_range(TURNS // 2):
            first, second = made[turn * 8 + tile * 2], made[turn * 8 + tile * 2 + 1]
            third, fourth = made[turn * 8 + 4 + tile * 2], made[turn * 8 + 5 + tile * 2]
            high, low = _cut(first, second, third, fourth)
            more: tl.tuple = ()
            for j in tl.static_range(4):
                more += (_added(totals[j], high, low, (right[turn * 8 + j], right[turn * 8 + 4 + j]), exact, ptx),)
            totals = more
        sums += (totals,)
    after: tl.tuple = ()
    for j in tl.static_range(4):
        for tile in tl.static_range(2):
            for entry in tl.static_range(4):
                after += (piece[j * 8 + tile * 4 + entry] * all_left + sums[tile][j][entry],)
    return after


@triton.jit
def _columns(fours, count: tl.constexpr):
    """The columns of all [32, 4], in float32."""
    made: tl.tuple = ()
    for n in tl.static_range(count):
        made += four(fours[n].to(tl.float32))
    return made


@triton.jit
def _piece(at, row, inner, inside, dk: tl.constexpr, dv: tl.constexpr):
    """32 rows of the state, from some row on, as sums [16, 8] that are transposed: columns × rows."""
    made: tl.tuple = ()
    for j in tl.static_range(4):
        here = row + inner * 8 + j
        even = tl.load(at + (row + j) * dv, mask=inside & (here < dk)[:, None], other=0.0)
        odd = tl.load(at + (row + 4 + j) * dv, mask=inside & (here + 4 < dk)[:, None], other=0.0)
        e0, e1, e2, e3 = four(even)
        o0, o1, o2, o3 = four(odd)
        made += (e0, o0, e1, o1, e2, o2, e3, o3)
    return made


@triton.jit
def _store(at, row, piece, inner, inside, dk: tl.constexpr, dv: tl.constexpr):
    for j in tl.static_range(4):
        here = row + inner * 8 + j
        even = beside(piece[j * 8], piece[j * 8 + 2], piece[j * 8 + 4], piece[j * 8 + 6])
        tl.store(at + (row + j) * dv, even, mask=inside & (here < dk)[:, None])
        odd = beside(piece[j * 8 + 1], piece[j * 8 + 3], piece[j * 8 + 5], piece[j * 8 + 7])
        tl.store(at + (row + 4 + j) * dv, odd, mask=inside & (here + 4 < dk)[:, None])


@triton.jit
def _ask(k, to_q, q_stride, k_stride, row, quad, inner, count, each: tl.constexpr, dk: tl.constexpr,
         tiles: tl.constexpr):  # fmt: skip
    """Keys and queries of all tokens at the rows of a piece: for each tile of eight, even and odd columns of sums."""
    asked: tl.tuple = ()
    column = inner[:, None] * 8 + tl.arange(0, 4)[None, :]
    for tile in tl.static_range(tiles):
        vector = tile * 8 + quad
        token = tl.where(vector < each, vector, vector - each)
        base = tl.where(vector < each, token * k_stride, token * q_stride + to_q)[:, None]
        there = ((vector < 2 * each) & (token < count))[:, None]
        for late in tl.static_range(2):
            at = row + late * 4 + column
            asked += (tl.load(k + base + at, mask=there & (at < dk), other=0.0),)
    return asked


@triton.jit
def _see(piece, asked, seen, tiles: tl.constexpr, exact: tl.constexpr, ptx: tl.constexpr):
    """What keys and queries see of a piece, added to what they have seen."""
    asked = _columns(asked, 2 * tiles)
    for j in tl.static_range(4):
        more: tl.tuple = ()
        for half in tl.static_range(2):  # of the columns
            first, second, third, fourth = _of(piece, j * 8 + half * 4)
            high, low = _cut(first, third, second, fourth)  # a sum as a left factor
            for tile in tl.static_range(tiles):
                of_asked = (asked[tile * 8 + j], asked[tile * 8 + 4 + j])
                total = _added(_of(seen, (half * tiles + tile) * 4), high, low, of_asked, exact, ptx)
                for entry in tl.static_range(4):
                    more += (total[entry],)
        seen = more
    return seen


@triton.jit
def _look(
    k, to_q, out, keys, decays, changes, states, starts, counts, reads, owed_start, owed, keeps,
    q_stride, k_stride, slot_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, each: tl.constexpr,
    pieces: tl.constexpr, exact: tl.constexpr, ptx: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """What keys and queries see of so many pieces, as they are and nothing decayed: out [rows, heads, parts, 2 · each,
    dv]. Nothing of this step has touched the state, nor what is owed: where it follows, both are done with before."""
    lead(follows)
    slices: tl.constexpr = (dv + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = (2 * each + 7) // 8
    k_step: tl.constexpr = heads // group * dk
    row, head, lane = tl.program_id(1), tl.program_id(0) // slices, tl.arange(0, LANES)
    quad, inner, begin = lane // 4, lane % 4, tl.program_id(2) * (pieces * PIECE)
    four_of = tl.arange(0, 4)[None, :]
    in_piece, column = quad[:, None] * 4 + four_of, tl.program_id(0) % slices * COLUMNS + quad[:, None] * 4 + four_of
    inside = column < dv
    start, count = number(starts + row).to(tl.int64), number(counts + row)
    source, target = number(reads + row).to(tl.int64), number(keeps + row).to(tl.int64)
    tokens, first = number(owed + row), number(owed_start + row).to(tl.int64)
    if count == 0:  # there is no such row
        follow(follows)
        return
    at = states + head * dk * dv + inner[:, None] * (8 * dv) + column
    read, written = at + source * slot_stride, at + target * slot_stride
    keys += first * k_step + head // group * dk + in_piece
    k += start * k_stride + head // group * dk
    there = inside & (source >= 0)
    decays += first * heads + head
    changes += (first * heads + head) * dv + column
    zero = tl.zeros((LANES,), tl.float32)
    seen: tl.tuple = ()
    for _ in tl.static_range(tiles * 8):
        seen += (zero,)
    piece = _piece(read, begin, inner, there, dk, dv)
    old = _keys(keys + begin, tokens, inner, begin + in_piece < dk, k_step)
    if not follows:
        asked = _ask(k, to_q, q_stride, k_stride, begin, quad, inner, count, each, dk, tiles)
    all_left, made = _owed(decays, changes, tokens, inner, inside, dv, heads)
    for n in tl.range(pieces, num_stages=1):
        here = begin + n * PIECE
        after = _moved(piece, old, all_left, made, exact, ptx)
        if pieces > 1:  # the next one comes while this is stored and seen
            going_on = n + 1 < pieces
            piece = _piece(read, here + PIECE, inner, there & going_on, dk, dv)
            old = _keys(keys + here + PIECE, tokens, inner, (here + PIECE + in_piece < dk) & going_on, k_step)
        if target >= 0:
            _store(written, here, after, inner, inside, dk, dv)
        if follows:
            tl.debug_barrier()  # else the compiler would load when it is used, for which it needs fewer registers
            follow(follows)
            asked = _ask(k, to_q, q_stride, k_stride, here, quad, inner, count, each, dk, tiles)
        seen = _see(after, asked, seen, tiles, exact, ptx)
        if pieces > 1:
            asked = _ask(k, to_q, q_stride, k_stride, here + PIECE, quad, inner, count, each, dk, tiles)
    out += ((row.to(tl.int64) * heads + head) * tl.num_programs(2) + tl.program_id(2)) * (2 * each * dv) + column
    for tile in tl.static_range(tiles):
        for odd in tl.static_range(2):
            vector = tile * 8 + inner * 2 + odd
            near, far = _of(seen, tile * 4), _of(seen, (tiles + tile) * 4)
            value = beside(near[odd], near[odd + 2], far[odd], far[odd + 2])
            tl.store(out + vector[:, None] * dv, value, mask=inside & (vector < 2 * each)[:, None])


@triton.jit
def _brought(base, stride, last, there, each: tl.constexpr):
    """What all tokens bring of something, asked for at once. Past the end the last token does again."""
    made: tl.tuple = ()
    for t in tl.static_range(each):
        made += (tl.load(base + tl.minimum(t, last) * stride, mask=there, other=0.0),)
    return made


@triton.jit
def _summed(base, last, there, dv: tl.constexpr, each: tl.constexpr, apart: tl.constexpr):
    """What was seen in several parts."""
    made = _brought(base, dv, last, there, each)
    for part in tl.static_range(1, apart):
        other = _brought(base + part * (2 * each * dv), dv, last, there, each)
        more: tl.tuple = ()
        for t in tl.static_range(each):
            more += (made[t] + other[t],)
        made = more
    return made


@triton.jit
def _say(
    q, k, v, a, b, z, saw, out, keys, decays, changes, starts, counts, records, rate, dt_bias, weight, eps, scale,
    q_stride, k_stride, v_stride, a_stride, b_stride, z_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, block_k: tl.constexpr,
    block_v: tl.constexpr, each: tl.constexpr, apart: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """Changes are divided by the length of their keys, which are recorded as they are.

    What no launch of this step has written is asked for before this follows.
    """
    lead(follows)
    head, row, ks, vs = tl.program_id(0), tl.program_id(1), tl.arange(0, block_k), tl.arange(0, block_v)
    start, last = number(starts + row).to(tl.int64), number(counts + row) - 1
    record = number(records + row).to(tl.int64)
    of_rate, of_bias = tl.load(rate + head), tl.load(dt_bias + head)
    by = tl.load(weight + vs, mask=vs < dv, other=0.0).to(tl.float32)
    follow(follows)
    if last < 0:
        return
    in_key, in_value, k_step = ks < dk, vs < dv, heads // group * dk
    new = _brought(k + start * k_stride + head // group * dk + ks, k_stride, last, in_key, each)
    queries = _brought(q + start * q_stride + head // group * dk + ks, q_stride, last, in_key, each)
    values = _brought(v + start * v_stride + head * dv + vs, v_stride, last, in_value, each)
    opened = _brought(z + start * z_stride + head * dv + vs, z_stride, last, in_value, each)
    of_a = _brought(a + start * a_stride + head, a_stride, last, True, each)
    of_b = _brought(b + start * b_stride + head, b_stride, last, True, each)
    saw += (row.to(tl.int64) * heads + head) * (apart * 2 * each * dv) + vs
    seen = _summed(saw, last, in_value, dv, each, apart)
    heard = _summed(saw + each * dv, last, in_value, dv, each, apart)
    keys += record * k_step + head // group * dk + ks
    decays += record * heads + head
    changes += (record * heads + head) * dv + vs
    out += (start * heads + head) * dv + vs
    dtype: tl.constexpr = v.dtype.element_ty
    moves: tl.tuple = ()  # changes so far
    remain: tl.tuple = ()  # and what is left of each
    answers: tl.tuple = ()
    total = 1.0
    for t in tl.static_range(each):
        g, beta = gates_of(of_a[t], of_b[t], of_rate, of_bias)
        key, query, decay = new[t].to(tl.float32), queries[t].to(tl.float32), tl.exp(g)
        total *= decay
        of_state, said = seen[t] * total, heard[t] * total
        still: tl.tuple = ()
        for s in tl.static_range(t):
            before = new[s].to(tl.float32)
            still += (remain[s] * decay,)
            of_state += moves[s] * (still[s] * tl.sum(before * key, 0))
            said += moves[s] * (still[s] * tl.sum(before * query, 0))
        length = length_of(key)
        moved = (values[t].to(tl.float32) - of_state * length) * (beta * length)
        said = (said + moved * tl.sum(key * query, 0)) * (length_of(query) * scale)
        there = t <= last
        tl.store(changes + t * (heads * dv), moved, mask=there & in_value)
        tl.store(decays + t * heads, g, mask=there)
        tl.store(keys + t * k_step, new[t], mask=there & (head % group == 0) & in_key)
        moves += (moved,)
        answers += (said.to(dtype),)
        still += (1.0,)
        remain = still
    for t in tl.static_range(each):  # apart, so that none waits for the one before
        said, gate = answers[t].to(tl.float32), opened[t].to(tl.float32)
        said *= tl.rsqrt(tl.sum(said * said, 0) / dv + eps)
        said = (said.to(dtype).to(tl.float32) * by).to(dtype).to(tl.float32)  # as ops.rms_norm_gated rounds
        tl.store(out + t * (heads * dv), said * gate * tl.sigmoid(gate), mask=(t <= last) & in_value)


def advance_late(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    rows: ShortRows,
    layer: DeltaLayer,
    kept: tuple[Tensor, ...],
    owed: Owed,
) -> Tensor:
    """What ops.gated_delta_layer does, where slots lag behind and rows are padded to as many tokens each.

    Keys, decays and changes are recorded where they are `kept`.
    """
    (total, k_heads, dk), (_, heads, dv), count = k.shape, v.shape, len(rows.start)
    each, passing = triton.cdiv(total, count), passing_on(v.device, total)
    for of_heads in (q, k, v):
        assert of_heads.stride(2) == 1 and of_heads.stride(1) == of_heads.shape[2]
    assert q.stride(0) == k.stride(0)  # they are parts of one tensor
    assert states.stride()[1:] == (dk * dv, dv, 1) and a.stride(1) == b.stride(1) == z.stride(1) == 1
    slices, pieces = triton.cdiv(dv, COLUMNS), triton.cdiv(dk, PIECE)
    apart = pieces if passing["follows"] or heads * slices * count <= BUSY else 1
    out = with_spare(v, v.shape)
    if apart == 1 and advance(Brought(q, k, v, z, a, b), out, states, rows, layer, kept, owed):
        return out
    seen = v.new_empty(count, heads, apart, 2 * each, dv, dtype=torch.float32)
    to_q = (q.data_ptr() - k.data_ptr()) // k.element_size()
    _look[heads * slices, count, apart](
        k, to_q, seen, *kept, states, rows.start, rows.tokens, rows.read, owed.start, owed.tokens, owed.keep,
        q.stride(0), k.stride(0), states.stride(0), heads=heads, group=heads // k_heads, dk=dk, dv=dv, each=each,
        pieces=pieces // apart, exact=k.dtype != torch.float32, ptx=has_ptx(v.device), num_warps=1, **passing,
    )  # fmt: skip
    _say[heads, count](
        q, k, v, a, b, z, seen, out, *kept, rows.start, rows.tokens, owed.record, layer.rate, layer.dt_bias, layer.norm,
        layer.eps, dk**-0.5, q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), z.stride(0),
        heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=triton.next_power_of_2(dk),
        block_v=triton.next_power_of_2(dv), each=each, apart=apart, num_warps=1, **passing,
    )  # fmt: skip
    return out
