# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule for many rows of a few tokens whose slots lag behind: states stream by, and nobody carries them.

Such a row stores its state as it was before its tokens, if at all. With S for that state after what is owed, and d for
the decay from one token to another, a window's token t changes and says (q and k of unit length)
    change_t = β_t (v_t − d_t Sᵀk_t − Σ_s<t d_st (k_s·k_t) change_s)
    out_t    = d_t Sᵀq_t + Σ_s≤t d_st (k_s·q_t) change_s
so all that tokens need of S is what their keys and queries see of it. A program is one warp and takes a head: rows of S
come by in pieces, are moved on by what is owed, stored, and seen by all tokens at once; what tokens do to one another
is made up for in the end. That takes two instructions a number and token where a state that is carried takes four, and
pieces are on their way while others are worked on. But a program for each head is few programs: it takes many rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Owed
from bough.ops.spans import FEW
from bough.ops.triton.gates import gates_of, length_of

MANY = 2048  # heads of all rows: as many as a large device works on in two turns
COLUMNS = 128  # of a state, up to which a warp holds what up to FEW tokens see of them
PIECE = 8  # rows of a state
AHEAD = tl.constexpr(3)  # pieces, of which one is worked on
MOST = tl.constexpr(FEW)  # tokens that a row owes
OWED = tl.constexpr(triton.next_power_of_2(FEW))


@triton.jit
def _settled(piece, keys, changes, left, all_left, tokens, k_step: tl.constexpr, v_step: tl.constexpr):
    """A piece of the state after what is owed, added up in the same order as where a state is carried."""
    piece *= all_left
    for t in tl.static_range(MOST):
        if MOST - 1 - t < tokens:
            change = tl.load(changes + (MOST - 1 - t) * v_step) * left[t]
            piece += tl.load(keys + (MOST - 1 - t) * k_step).to(tl.float32)[:, None] * change[None, :]
    return piece


@triton.jit
def _seen(piece, k, q, k_stride, q_stride, last, seen, heard):
    """What keys and queries see of a piece, added to what they have seen. Past the end the last token sees it again."""
    more_seen: tl.tuple = ()
    more_heard: tl.tuple = ()
    for t in tl.static_range(len(seen)):
        token = tl.minimum(t, last)
        key, query = tl.load(k + token * k_stride).to(tl.float32), tl.load(q + token * q_stride).to(tl.float32)
        more_seen += (seen[t] + tl.sum(piece * key[:, None], 0),)
        more_heard += (heard[t] + tl.sum(piece * query[:, None], 0),)
    return more_seen, more_heard


@triton.jit
def _brought(k, q, v, a, b, k_stride, q_stride, v_stride, a_stride, b_stride, in_key, last, each: tl.constexpr):
    """What tokens bring, all of it at once: keys, queries and values, and what their gates are made of."""
    keys: tl.tuple = ()
    queries: tl.tuple = ()
    values: tl.tuple = ()
    of_a: tl.tuple = ()
    of_b: tl.tuple = ()
    for t in tl.static_range(each):
        token = tl.minimum(t, last)
        keys += (tl.load(k + token * k_stride, mask=in_key, other=0.0),)
        queries += (tl.load(q + token * q_stride, mask=in_key, other=0.0),)
        values += (tl.load(v + token * v_stride),)
        of_a += (tl.load(a + token * a_stride),)
        of_b += (tl.load(b + token * b_stride),)
    return keys, queries, values, of_a, of_b


@triton.jit
def _heads(
    q, k, v, a, b, out, keys, decays, changes, states, starts, counts, reads, owed_start, owed, keeps, records, rate,
    dt_bias, scale, q_stride, k_stride, v_stride, a_stride, b_stride, slot_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, block_k: tl.constexpr,
    rows: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """A row has up to `each` tokens. Changes are divided by the length of their keys, which are taken as they are."""
    head, row, ks, vs = tl.program_id(0), tl.program_id(1), tl.arange(0, rows), tl.arange(0, dv)
    k_step: tl.constexpr = heads // group * dk
    v_step: tl.constexpr = heads * dv
    start, last = tl.load(starts + row).to(tl.int64), tl.load(counts + row) - 1
    source, target = tl.load(reads + row).to(tl.int64), tl.load(keeps + row).to(tl.int64)
    tokens, first = tl.load(owed + row), tl.load(owed_start + row).to(tl.int64)
    record = tl.load(records + row).to(tl.int64)
    if last < 0:
        return  # there is no such row
    at = states + head * dk * dv + ks[:, None] * dv + vs[None, :]
    old_keys, old_changes = keys + first * k_step + head // group * dk + ks, changes + (first * heads + head) * dv + vs
    old_decays, i = decays + first * heads + head, tl.arange(0, OWED)
    all_left = tl.exp(tl.sum(tl.load(old_decays + i * heads, mask=i < tokens, other=0.0), 0))
    left: tl.tuple = ()  # of what each owed token changed, after those that came later; the last one first
    after = 0.0
    for t in tl.static_range(MOST):
        left += (tl.exp(after),)
        after += tl.load(old_decays + (MOST - 1 - t) * heads, mask=MOST - 1 - t < tokens, other=0.0)
    seen: tl.tuple = ()
    for _ in tl.static_range(each):
        seen += (tl.zeros((dv,), tl.float32),)
    heard = seen
    k += start * k_stride + head // group * dk
    q += start * q_stride + head // group * dk
    for done in tl.range(0, dk, rows, num_stages=AHEAD):  # what is stored in place has been loaded before
        piece = tl.load(at + source * slot_stride + done * dv, mask=source >= 0, other=0.0)
        piece = _settled(piece, old_keys + done, old_changes, left, all_left, tokens, k_step, v_step)
        if target >= 0:
            tl.store(at + target * slot_stride + done * dv, piece)
        seen, heard = _seen(piece, k + done + ks, q + done + ks, k_stride, q_stride, last, seen, heard)

    whole = tl.arange(0, block_k)
    new, queries, values, of_a, of_b = _brought(
        k + whole, q + whole, v + start * v_stride + head * dv + vs, a + start * a_stride + head,
        b + start * b_stride + head, k_stride, q_stride, v_stride, a_stride, b_stride, whole < dk, last, each,
    )  # fmt: skip
    of_rate, of_bias = tl.load(rate + head), tl.load(dt_bias + head)
    keys += record * k_step + head // group * dk + whole
    decays += record * heads + head
    changes += (record * heads + head) * dv + vs
    out += (start * heads + head) * dv + vs
    moves: tl.tuple = ()  # changes so far
    remain: tl.tuple = ()  # and what is left of each
    total = 1.0
    for t in tl.static_range(each):
        g, beta = gates_of(of_a[t], of_b[t], of_rate, of_bias)
        key, query, decay = new[t].to(tl.float32), queries[t].to(tl.float32), tl.exp(g)
        total *= decay
        saw, said = seen[t] * total, heard[t] * total
        still: tl.tuple = ()
        for s in tl.static_range(t):
            before = new[s].to(tl.float32)
            still += (remain[s] * decay,)
            saw += moves[s] * (still[s] * tl.sum(before * key, 0))
            said += moves[s] * (still[s] * tl.sum(before * query, 0))
        length = length_of(key)
        moved = (values[t].to(tl.float32) - saw * length) * (beta * length)
        said = (said + moved * tl.sum(key * query, 0)) * (length_of(query) * scale)
        tl.store(out + t * v_step, said, mask=t <= last)
        tl.store(changes + t * v_step, moved, mask=t <= last)
        tl.store(decays + t * heads, g, mask=t <= last)
        tl.store(keys + t * k_step, new[t], mask=(t <= last) & (head % group == 0) & (whole < dk))
        moves += (moved,)
        still += (1.0,)
        remain = still


def streams(states: Tensor, rows: int) -> bool:
    """Whether the heads of so many rows are enough, and their states of a shape that streams."""
    _, heads, dk, dv = states.shape
    return rows * heads >= MANY and dk % PIECE == 0 and dv <= COLUMNS and dv == triton.next_power_of_2(dv)


def stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    states: Tensor,
    start: Tensor,
    count: Tensor,
    read: Tensor,
    gates: tuple[Tensor, Tensor],
    kept: tuple[Tensor, ...],
    owed: Owed,
) -> None:
    """What delta.advance_short does, where slots lag behind and no row has more tokens than there is room for in each.

    Keys, decays and changes are recorded where they are `kept`.
    """
    (total, k_heads, dk), (_, heads, dv) = k.shape, v.shape
    _heads[heads, len(start)](
        q, k, v, a, b, out, *kept, states, start, count, read, *owed, *gates, dk**-0.5,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0),
        heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=triton.next_power_of_2(dk), rows=PIECE,
        each=triton.cdiv(total, len(start)), num_warps=1,
    )  # fmt: skip
