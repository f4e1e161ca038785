# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule: short rows token by token here, long ones in chunks (chunks.py).

A program carries a slice of one v head's columns in the registers of one warp: the state is read once and written once
however many tokens the row has, and nobody waits for another. Decoding is a matter of that traffic; unit lengths, and
on demand the gates, are done on the side. The norm after it takes whole heads, which are too large for this: it is a
launch of its own.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.delta import delta_gates
from bough.ops.ragged import Carried, Rows, Slots, close_slots, open_slots
from bough.ops.triton.chunks import advance_long, chunk_tokens
from bough.ops.triton.conv import causal_conv
from bough.ops.triton.norm import rms_norm_gated
from bough.ops.triton.plan import plan

EPS = tl.constexpr(1e-6)  # under the root of q's and k's length
CARRIED = 4096  # numbers that a warp carries through one token; half of them, if there are more


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The small weights of a gated-delta layer."""

    taps: Tensor  # [K, C] float32
    rate: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv] float32
    norm: Tensor  # [dv]
    eps: float


@triton.jit
def _gates(a, b, rate, dt_bias):
    """The decay and the step size of one token and head: as ops.delta_gates rounds them."""
    x = a.to(tl.float32) + dt_bias
    g = rate * tl.where(x > 20, x, tl.log(1 + tl.exp(x)))
    return tl.exp(g), tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)


@triton.jit
def _short_rows(
    q, k, v, a, b, out, changes, states, starts, counts, reads, writes, rate, dt_bias, scale,
    q_stride, k_stride, v_stride, a_stride, b_stride, slot_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr, projected: tl.constexpr, recorded: tl.constexpr,
):  # fmt: skip
    """a and b are g and β; or, if `projected`, what these are made of. If `recorded`, changes are kept."""
    row, head = tl.program_id(1), tl.program_id(0) // tl.cdiv(dv, block_v)
    ks = tl.arange(0, block_k)
    vs = tl.program_id(0) % tl.cdiv(dv, block_v) * block_v + tl.arange(0, block_v)
    start, count = tl.load(starts + row).to(tl.int64), tl.load(counts + row)
    source, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    inside = (ks < dk)[:, None] & (vs < dv)[None, :]
    at = head * dk * dv + ks[:, None] * dv + vs[None, :]
    state = tl.load(states + source * slot_stride + at, mask=inside & (source >= 0), other=0.0)
    for t in range(start, start + count):
        key = tl.load(k + t * k_stride + head // group * dk + ks, mask=ks < dk, other=0.0).to(tl.float32)
        query = tl.load(q + t * q_stride + head // group * dk + ks, mask=ks < dk, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_stride + head * dv + vs, mask=vs < dv, other=0.0)
        key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
        query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * scale
        decay, beta = tl.load(a + t * a_stride + head), tl.load(b + t * b_stride + head)
        if projected:
            decay, beta = _gates(decay, beta, tl.load(rate + head), tl.load(dt_bias + head))
        else:
            decay = tl.exp(decay)
        # What the key and the query see of the state before the token is all that is needed of it.
        seen = tl.sum(state * key[:, None], 0)
        heard = tl.sum(state * query[:, None], 0)
        change = (value.to(tl.float32) - decay * seen) * beta
        state = state * decay + key[:, None] * change[None, :]
        said = heard * decay + change * tl.sum(key * query, 0)
        tl.store(out + (t * heads + head) * dv + vs, said, mask=vs < dv)
        if recorded:
            tl.store(changes + (t * heads + head) * dv + vs, change, mask=vs < dv)
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
    changes = v.new_empty(v.shape, dtype=torch.float32) if any(slots.records) else None
    if len(short.start):
        advance_short(q, k, v, g, beta, out, slots.data, *short, changes=changes)
    if len(long.read):
        advance_long(q, k, v, g, beta, out, slots.data, long)
    if changes is not None:  # of rows that are recorded, all of which are among the short ones
        for row, start, end in rows:
            slots.record(row, *(each[start:end] for each in (k, g, changes)))
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
    changes: Tensor | None = None,
) -> None:
    """Rows of a few tokens: g and β in `a` and `b`; or their projections, with the layer's rate and dt_bias.

    What each token changes goes to `changes`, where that is wanted.
    """
    (total, k_heads, dk), (_, heads, dv) = k.shape, v.shape
    for each in (q, k, v):
        assert each.stride(2) == 1 and each.stride(1) == each.shape[2]
    assert states.stride()[1:] == (dk * dv, dv, 1) and a.stride(1) == b.stride(1) == 1 and out.is_contiguous()
    block_k = triton.next_power_of_2(dk)
    fits = CARRIED // block_k // (1 if total == len(start) else 2)
    block_v = max(1, min(triton.next_power_of_2(dv), fits))
    _short_rows[heads * triton.cdiv(dv, block_v), len(start)](
        q, k, v, a, b, out, changes, states, start, count, read, write, *(gates or (None, None)), dk**-0.5,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0),
        heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=block_k, block_v=block_v,
        projected=gates is not None, recorded=changes is not None, num_warps=1,
    )  # fmt: skip


def gated_delta_layer(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    layer: DeltaLayer,
    k_heads: int,
    rows: Rows,
    tails: Slots,
    states: Slots,
) -> Tensor:
    """From the projections qkv [T, C], z [T, Hv · dv], b and a [T, Hv] to the normed output [T, Hv, dv].

    What ops does in causal_conv, delta_gates, gated_delta and rms_norm_gated.
    """
    slots = open_slots("gated_delta_layer", rows, states, None)
    (_, heads, dk, dv), total = slots.data.shape, len(qkv)
    qkv = causal_conv(qkv, layer.taps, rows, stored=tails, silu=True).out
    keys = k_heads * dk
    q, k = (qkv[:, at : at + keys].view(total, k_heads, dk) for at in (0, keys))
    v = qkv[:, 2 * keys :].view(total, heads, dv)
    short, long = plan(rows, slots, chunk_tokens(v.dtype))
    if len(long.read) or any(slots.records):
        g, beta = delta_gates(a, b, layer.rate, layer.dt_bias)
        out = gated_delta(q, k, v, g, beta, rows, stored=states).out
    else:
        out = v.new_empty(v.shape)
        advance_short(q, k, v, a, b, out, slots.data, *short, gates=(layer.rate, layer.dt_bias))
    return rms_norm_gated(out, z.view(v.shape), layer.norm, layer.eps)
