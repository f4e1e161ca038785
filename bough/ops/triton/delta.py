# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule: short rows token by token here, long ones in chunks (chunks.py), and rows whose slots lag
behind by what tokens see of them (seen.py).

A program carries a slice of one v head's columns in the registers of one warp: the state is read once and written at
most once however many tokens the row has, and nobody waits for another. Unit lengths, and on demand the gates, are done
on the side. The norm after it takes whole heads, which are too large for this: it is a launch of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.delta import DeltaLayer, split_heads
from bough.ops.ragged import Carried, Rows, ShortRows, Slots, close_slots, open_slots
from bough.ops.triton.chunks import advance_long, chunk_tokens
from bough.ops.triton.gates import delta_gates, gates_of, length_of
from bough.ops.triton.norm import rms_norm_gated
from bough.ops.triton.plan import plan
from bough.ops.triton.seen import advance_late

CARRIED = 4096  # numbers of a state that a warp carries
BUSY = 512  # programs that keep a device busy: as few carry half of that through several tokens, in less time


@triton.jit
def _vector(pointer, mask):
    """In float32, and 0 outside."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _token(q, k, v, a, b, q_stride, k_stride, v_stride, a_stride, b_stride, t, there, in_key, in_value):
    """What token t of a row brings: key, query and value, and what its gates are made of. Zeros if it is not there."""
    key, query = _vector(k + t * k_stride, in_key & there), _vector(q + t * q_stride, in_key & there)
    value = _vector(v + t * v_stride, in_value & there)
    of_a, of_b = tl.load(a + t * a_stride, mask=there, other=0.0), tl.load(b + t * b_stride, mask=there, other=0.0)
    return key, query, value, of_a, of_b


@triton.jit
def _short_rows(
    q, k, v, a, b, out, decays, changes, states, starts, counts, reads, writes, rate, dt_bias, scale,
    q_stride, k_stride, v_stride, a_stride, b_stride, slot_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr, projected: tl.constexpr, recorded: tl.constexpr,
):  # fmt: skip
    """a and b are g and β; or, if `projected`, what these are made of. If `recorded`, changes and made g are kept.

    What a token needs is loaded while the one before it is worked on.
    """
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
                tl.store(decays + entry, g, mask=part == 0)
        # What the key and the query see of the state before the token is all that is needed of it.
        decay, length = tl.exp(g), length_of(key)
        seen = tl.sum(state * key[:, None], 0) * (decay * length)
        heard = tl.sum(state * query[:, None], 0) * decay
        moved = (value - seen) * (beta * length)
        said = (heard + moved * tl.sum(key * query, 0)) * (length_of(query) * scale)
        tl.store(out + entry * dv + vs, said, mask=in_value)
        if recorded:
            tl.store(changes + entry * dv + vs, moved, mask=in_value)
        if more | (target >= 0):
            state = state * decay + key[:, None] * moved[None, :]
        key, query, value, of_a, of_b = next_key, next_query, next_value, next_a, next_b
    if target >= 0:
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
        advance_short(q, k, v, g, beta, out, slots.data, short, kept=(g, changes))
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
    rows: ShortRows,
    gates: tuple[Tensor, Tensor] | None = None,
    kept: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Rows of a few tokens: g and β in `a` and `b`; or their projections, with the layer's rate and dt_bias.

    Decays and changes are recorded where they are `kept`.
    """
    (total, k_heads, dk), (_, heads, dv), count = k.shape, v.shape, len(rows.start)
    for each in (q, k, v):
        assert each.stride(2) == 1 and each.stride(1) == each.shape[2]
    assert states.stride()[1:] == (dk * dv, dv, 1) and a.stride(1) == b.stride(1) == 1 and out.is_contiguous()
    block_k = triton.next_power_of_2(dk)
    fits = CARRIED // block_k
    if total > count and heads * triton.cdiv(dv, fits) * count <= BUSY:
        fits //= 2
    block_v = max(1, min(triton.next_power_of_2(dv), fits))
    _short_rows[heads * triton.cdiv(dv, block_v), count](
        q, k, v, a, b, out, *kept, states, *rows, *(gates or (None, None)), dk**-0.5,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0),
        heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=block_k, block_v=block_v,
        projected=gates is not None, recorded=kept[1] is not None, num_warps=1,
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
    if slots.recording is not None and slots.owed is not None:
        kept = slots.recording.room((k, k.dtype), (a, torch.float32), (v, torch.float32))
        return advance_late(q, k, v, z, a, b, slots.data, short, layer, kept, slots.owed)
    if len(long.read):
        g, beta = delta_gates(a, b, layer.rate, layer.dt_bias)
        out = gated_delta(q, k, v, g, beta, rows, stored=states).out
    else:
        out, decays, changes = v.new_empty(v.shape), None, None
        if slots.recording is not None:
            decays, changes = (each.new_empty(each.shape, dtype=torch.float32) for each in (a, v))
        if len(short.start):
            advance_short(q, k, v, a, b, out, slots.data, short, (layer.rate, layer.dt_bias), (decays, changes))
        if decays is not None and changes is not None:
            slots.record(rows, k, decays, changes)
    return rms_norm_gated(out, z.view(v.shape), layer.norm, layer.eps)
