# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule: short rows token by token here, long ones in chunks (chunks.py).

Where slots lag behind and there are many rows, their states are not carried (streamed.py).

A program carries a slice of one v head's columns in the registers of one warp: the state is read once and written at
most once however many tokens the row has, and nobody waits for another. Decoding is a matter of that traffic; unit
lengths, and on demand the gates, are done on the side. The norm after it takes whole heads, which are too large for
this: it is a launch of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.delta import DeltaLayer, split_heads
from bough.ops.ragged import Carried, Owed, Rows, Slots, close_slots, open_slots
from bough.ops.spans import FEW
from bough.ops.triton.chunks import advance_long, chunk_tokens
from bough.ops.triton.follow import follow, lead, passing_on
from bough.ops.triton.gates import delta_gates, gates_of, length_of
from bough.ops.triton.norm import rms_norm_gated
from bough.ops.triton.plan import plan
from bough.ops.triton.streamed import stream, streams

OWED = tl.constexpr(triton.next_power_of_2(FEW))  # tokens, or fewer, that a row owes
AHEAD = tl.constexpr(5)  # a recorded token is asked for while four others are added up
CARRIED = 4096  # numbers of a state that a warp carries
BUSY = 512  # programs that keep a device busy: as few carry half of that through several tokens, in less time


class Kept(NamedTuple):
    """Where what moves a state on is recorded, and what is owed of that."""

    keys: Tensor | None = None
    decays: Tensor | None = None
    changes: Tensor | None = None
    owed: Owed | None = None


@triton.jit
def _vector(pointer, mask):
    """In float32, and 0 outside."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _settled(
    state, keys, decays, changes, tokens, in_key, in_value, heads: tl.constexpr, k_step: tl.constexpr,
    v_step: tl.constexpr,
):  # fmt: skip
    """The state after some recorded tokens, the first of which is at these places.

    It decays once, by all of them; and what a token changed, by those after it. So the last one comes first.
    """
    if tokens > 0:
        i, last = tl.arange(0, OWED), tokens - 1
        state *= tl.exp(tl.sum(tl.load(decays + i * heads, mask=i < tokens, other=0.0), 0))
        after = 0.0
        for t in tl.range(0, tokens, num_stages=AHEAD):
            key, change = _vector(keys + (last - t) * k_step, in_key), _vector(changes + (last - t) * v_step, in_value)
            state += key[:, None] * (change * tl.exp(after))[None, :]
            after += tl.load(decays + (last - t) * heads)
    return state


@triton.jit
def _token(q, k, v, a, b, q_stride, k_stride, v_stride, a_stride, b_stride, t, there, in_key, in_value):
    """What token t of a row brings: key, query and value, and what its gates are made of. Zeros if it is not there."""
    key, query = _vector(k + t * k_stride, in_key & there), _vector(q + t * q_stride, in_key & there)
    value = _vector(v + t * v_stride, in_value & there)
    of_a, of_b = tl.load(a + t * a_stride, mask=there, other=0.0), tl.load(b + t * b_stride, mask=there, other=0.0)
    return key, query, value, of_a, of_b


@triton.jit
def _short_rows(
    q, k, v, a, b, out, keys, decays, changes, states, starts, counts, reads, writes, owed_start, owed, keeps,
    records, rate, dt_bias, scale, q_stride, k_stride, v_stride, a_stride, b_stride, slot_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr, projected: tl.constexpr, recorded: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    """a and b are g and β; or, if `projected`, what these are made of. If `recorded`, changes and made g are kept.

    Where slots may lag behind, keys are kept too. The state is then first moved on by what the row owes, stored if it
    is to be kept so, and not stored again. What a token needs is loaded while the one before it is worked on. Nothing
    of this step has touched the state, nor what is owed: both are done with before this follows.
    """
    lead(follows)
    row, head = tl.program_id(1), tl.program_id(0) // tl.cdiv(dv, block_v)
    part, ks = tl.program_id(0) % tl.cdiv(dv, block_v), tl.arange(0, block_k)
    vs = part * block_v + tl.arange(0, block_v)
    in_key, in_value = ks < dk, vs < dv
    start, count = tl.load(starts + row).to(tl.int64), tl.load(counts + row)
    source, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    k += start * k_stride + head // group * dk + ks
    q += start * q_stride + head // group * dk + ks
    v += start * v_stride + head * dv + vs
    a += start * a_stride + head
    b += start * b_stride + head
    inside = in_key[:, None] & in_value[None, :]
    at = head * dk * dv + ks[:, None] * dv + vs[None, :]
    state = tl.load(states + source * slot_stride + at, mask=inside & (source >= 0), other=0.0)
    k_step: tl.constexpr = heads // group * dk
    lags: tl.constexpr = owed is not None
    recording = start
    if lags:
        tokens, first = tl.load(owed + row), tl.load(owed_start + row).to(tl.int64)
        target, recording = tl.load(keeps + row).to(tl.int64), tl.load(records + row).to(tl.int64)
        state = _settled(
            state, keys + first * k_step + head // group * dk + ks, decays + first * heads + head,
            changes + (first * heads + head) * dv + vs, tokens, in_key, in_value, heads, k_step, heads * dv,
        )  # fmt: skip
        if target >= 0:
            tl.store(states + target * slot_stride + at, state, mask=inside)
        keys += recording * k_step + head // group * dk + ks
    if recorded:
        decays += recording * heads + head
        changes += (recording * heads + head) * dv + vs
    if follows:
        tl.debug_barrier()  # else the compiler would load when it is used, for which it needs fewer registers
        follow(follows)
    key, query, value, of_a, of_b = _token(
        q, k, v, a, b, q_stride, k_stride, v_stride, a_stride, b_stride, 0, count > 0, in_key, in_value
    )
    for t in range(count):
        more, entry = t + 1 < count, (start + t) * heads + head
        next_key, next_query, next_value, next_a, next_b = _token(
            q, k, v, a, b, q_stride, k_stride, v_stride, a_stride, b_stride, t + 1, more, in_key, in_value
        )
        g, beta = of_a, of_b
        if projected:
            g, beta = gates_of(of_a, of_b, tl.load(rate + head), tl.load(dt_bias + head))
            if recorded:
                tl.store(decays + t * heads, g, mask=part == 0)
        if lags:
            tl.store(keys + t * k_step, key, mask=in_key & (part == 0) & (head % group == 0))
        # What the key and the query see of the state before the token is all that is needed of it.
        decay, length = tl.exp(g), length_of(key)
        seen = tl.sum(state * key[:, None], 0) * (decay * length)
        heard = tl.sum(state * query[:, None], 0) * decay
        moved = (value - seen) * (beta * length)
        said = (heard + moved * tl.sum(key * query, 0)) * (length_of(query) * scale)
        tl.store(out + entry * dv + vs, said, mask=in_value)
        if recorded:
            tl.store(changes + t * (heads * dv), moved, mask=in_value)
        if more if lags else more | (target >= 0):
            state = state * decay + key[:, None] * moved[None, :]
        key, query, value, of_a, of_b = next_key, next_query, next_value, next_a, next_b
    if not lags and target >= 0:
        tl.store(states + target * slot_stride + at, state, mask=inside)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    *,
    stored: Slots | None = None,
    explicit: Tensor | None = None,
) -> Carried:
    """The twin of ops.gated_delta."""
    slots = open_slots("gated_delta", rows, stored, explicit)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    short, long = plan(rows, slots, chunk_tokens(v.dtype))
    changes = v.new_empty(v.shape, dtype=torch.float32) if slots.recording is not None else None
    if len(short.start):
        advance_short(q, k, v, g, beta, out, slots.data, *short, kept=Kept(decays=g, changes=changes))
    if len(long.read):
        advance_long(q, k, v, g, beta, out, slots.data, long)
    if changes is not None:  # of rows that are recorded, all of which are among the short ones
        slots.record(rows, k, g, changes)
    return close_slots(out, slots, explicit)


def advance_short(
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
    write: Tensor,
    gates: tuple[Tensor, Tensor] | None = None,
    kept: Kept | None = None,
) -> None:
    """Rows of a few tokens: g and β in `a` and `b`; or their projections, with the layer's rate and dt_bias.

    What moves states on is recorded where it is to be `kept`.
    """
    (total, k_heads, dk), (_, heads, dv), kept = k.shape, v.shape, kept or Kept()
    for each in (q, k, v):
        assert each.stride(2) == 1 and each.stride(1) == each.shape[2]
    assert states.stride()[1:] == (dk * dv, dv, 1) and a.stride(1) == b.stride(1) == 1 and out.is_contiguous()
    if kept.owed is not None and streams(states, len(start)):
        assert gates is not None and kept.keys is not None and kept.decays is not None and kept.changes is not None
        recorded = kept.keys, kept.decays, kept.changes
        stream(q, k, v, a, b, out, states, start, count, read, gates, recorded, kept.owed)
        return
    block_k = triton.next_power_of_2(dk)
    fits = CARRIED // block_k
    if total > len(start) and heads * triton.cdiv(dv, fits) * len(start) <= BUSY:
        fits //= 2
    block_v = max(1, min(triton.next_power_of_2(dv), fits))
    _short_rows[heads * triton.cdiv(dv, block_v), len(start)](
        q, k, v, a, b, out, *kept[:3], states, start, count, read, write, *(kept.owed or (None,) * 4),
        *(gates or (None, None)), dk**-0.5,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0),
        heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=block_k, block_v=block_v,
        projected=gates is not None, recorded=kept.changes is not None, num_warps=1, **passing_on(v.device, total),
    )  # fmt: skip


def gated_delta_layer(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    layer: DeltaLayer,
    k_heads: int,
    rows: Rows,
    states: Slots,
) -> Tensor:
    """The twin of ops.gated_delta_layer."""
    slots = open_slots("gated_delta_layer", rows, states, None)
    q, k, v = split_heads(qkv, k_heads, slots.data)
    short, long = plan(rows, slots, chunk_tokens(v.dtype))
    if len(long.read):
        g, beta = delta_gates(a, b, layer.rate, layer.dt_bias)
        out = gated_delta(q, k, v, g, beta, rows, stored=states).out
    else:
        out, kept = v.new_empty(v.shape), Kept()
        if slots.recording is not None and slots.owed is not None:
            keys, decays, changes = slots.recording.room((k, k.dtype), (a, torch.float32), (v, torch.float32))
            kept = Kept(keys, decays, changes, slots.owed)
        elif slots.recording is not None:
            decays, changes = (each.new_empty(each.shape, dtype=torch.float32) for each in (a, v))
            kept = Kept(k, decays, changes)
        if len(short.start):
            advance_short(q, k, v, a, b, out, slots.data, *short, (layer.rate, layer.dt_bias), kept)
        if kept.keys is not None and kept.decays is not None and kept.changes is not None:
            slots.record(rows, kept.keys, kept.decays, kept.changes)
    return rms_norm_gated(out, z.view(v.shape), layer.norm, layer.eps)
