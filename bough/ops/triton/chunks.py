# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule for long rows, in chunks of C tokens: what does not depend on the state, then one pass with it.

With K of unit length, Q of length 1 / √dk and G the running sum of g in the chunk, a chunk does
    wanted = V − exp(G) ∘ (K S)
    change = X wanted,                    X = (1 + A)⁻¹ diag(β),  A = strictly lower part of β ∘ K Kᵀ ∘ decays
    out    = exp(G) ∘ (Q S) + P X wanted,                         P = lower part of Q Kᵀ ∘ decays
    S      = exp(G_C) S + Kᵀ (exp(G_C − G) ∘ change)
`_systems` makes K and Q, X over P X, and the factors, of all chunks at once, as tiles that are 0 past the end of their
chunk; `_pass` carries S, a slice of its columns a program, from one chunk to the next.

Matrix units take float32 for float32 inputs, and else float16: 11 bits are what keeps the error of the output below
its own rounding to bfloat16, and what they hold is bounded by the values (the limit is |v| and |S| < 65,504).
"""

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.triton.activation import LOG2E
from bough.ops.triton.plan import Long, shared_bytes

EPS = tl.constexpr(1e-6)  # under the root of q's and k's length
DIAGONAL = tl.constexpr(16)
REGISTERS = 168  # of a thread: three programs of 128 threads then run beside each other
SEGMENT = 64  # chunks of a single row, whose states are carried while the next ones are solved
ASIDE = 12288  # bytes of shared memory that are left for the rest


def chunk_tokens(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


@triton.jit
def _of_length(length, pointer, mask):
    """Rows of this length, or shorter if near 0."""
    x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    return x * (length * tl.rsqrt(tl.sum(x * x, 1) + EPS))[:, None]


@triton.jit
def _merged(x, a, i, j, size: tl.constexpr, dtype: tl.constexpr):
    """Of matrices 1 + a, from the inverses x of their diagonal parts of `size` those of twice the size."""
    below = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
    rounded = x.to(dtype)
    below = tl.dot(tl.where(below, a, 0.0).to(dtype), rounded, input_precision="ieee")
    return x - tl.dot(rounded, below.to(dtype), input_precision="ieee")


@triton.jit
def _inverse(a, chunk: tl.constexpr, dtype: tl.constexpr):
    """(1 + a)⁻¹ of a strictly lower [C, C]. Small diagonal parts are merged as a batch of their own."""
    parts: tl.constexpr = chunk // DIAGONAL
    n, m = tl.arange(0, parts)[:, None, None, None], tl.arange(0, parts)[None, None, :, None]
    small = tl.sum(tl.where(n == m, a.reshape(parts, DIAGONAL, parts, DIAGONAL), 0.0), 2)
    i, j = tl.arange(0, DIAGONAL)[None, :, None], tl.arange(0, DIAGONAL)[None, None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -small, 0.0))
    for level in tl.static_range(1, 4):
        x = _merged(x, small, i, j, 2**level, dtype)
    x = tl.where(n == m, x[:, :, None, :], 0.0).reshape(chunk, chunk)
    i, j = tl.arange(0, chunk)[:, None], tl.arange(0, chunk)[None, :]
    x = _merged(x, a, i, j, 16, dtype)
    if chunk > 32:
        x = _merged(x, a, i, j, 32, dtype)
    return x


@triton.jit(do_not_specialize=("first",))
def _systems(
    q, k, g, beta, units, systems, factors, chunk_start, chunk_count, first, scale,
    q_stride, k_stride, g_stride, beta_stride,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, block_k: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    head, here = tl.program_id(0), first + tl.program_id(1)
    i, ks = tl.arange(0, chunk), tl.arange(0, block_k)
    inside = i < tl.load(chunk_count + here)
    token = tl.load(chunk_start + here).to(tl.int64) + i
    mask, at = inside[:, None] & (ks < dk)[None, :], head // group * dk + ks[None, :]
    dtype = units.dtype.element_ty
    key = _of_length(1.0, k + token[:, None] * k_stride + at, mask).to(dtype)
    query = _of_length(scale, q + token[:, None] * q_stride + at, mask).to(dtype)
    if head % group == 0:
        tile = units + (here.to(tl.int64) * (heads // group) + head // group) * 2 * chunk * block_k
        tl.store(tile + i[:, None] * block_k + ks[None, :], key)
        tl.store(tile + (chunk + i[:, None]) * block_k + ks[None, :], query)

    # A sum that reaches far down leaves float32 no digits for the differences between its last terms.
    total = tl.cumsum(tl.load(g + token * g_stride + head, mask=inside, other=0.0).to(tl.float64) * LOG2E, 0)
    whole = tl.sum(tl.where(i == chunk - 1, total, 0.0), 0)
    base = here.to(tl.int64) * heads + head
    line = factors + base * 2 * chunk + i
    tl.store(line, tl.exp2(total.to(tl.float32)))
    tl.store(line + chunk, tl.exp2((whole - total).to(tl.float32)))

    lower = i[:, None] >= i[None, :]
    decay = tl.exp2(tl.where(lower, total[:, None] - total[None, :], -float("inf")).to(tl.float32))
    square = systems + base * 2 * chunk * chunk + i[:, None] * chunk + i[None, :]
    step = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0)
    keys = tl.dot(key, tl.trans(key), input_precision="ieee") * step[:, None] * decay
    keys = tl.where(i[:, None] > i[None, :], keys, 0.0)
    solved = (_inverse(keys, chunk, dtype) * step[None, :]).to(dtype)
    tl.store(square, solved)
    seen = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
    tl.store(square + chunk * chunk, tl.dot(seen.to(dtype), solved, input_precision="ieee").to(dtype))


@triton.jit(do_not_specialize=("first", "last"))
def _pass(
    units, v, out, states, systems, factors, reads, pieces, piece_start, piece_end, piece_slot, piece_chunk,
    first, last, slot_stride, v_stride: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr, chunk: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The chunks [first, last), after which the own slot of a row has the state from which the next ones go on.

    All is turned, [dv, ...]: then a product has its result in the registers in which the next one takes it, and only
    K, Q, X and P X pass through shared memory.
    """
    row, head = tl.program_id(1), tl.program_id(0) // tl.cdiv(dv, block_v)
    i, ks = tl.arange(0, chunk), tl.arange(0, block_k)
    vs = tl.program_id(0) % tl.cdiv(dv, block_v) * block_v + tl.arange(0, block_v)
    at = head * dk * dv + ks[None, :] * dv + vs[:, None]
    inside = (ks < dk)[None, :] & (vs < dv)[:, None]
    unit_at, system_at = i[:, None] * block_k + ks[None, :], tl.arange(0, 2 * chunk)[:, None] * chunk + i[None, :]
    of_key, of_value = head // group * 2 * chunk * block_k, head * dv + vs[None, :]
    dtype = units.dtype.element_ty
    own = tl.load(pieces + row + 1) - 1
    eye = (i[:, None] == i[None, :]).to(v.dtype.element_ty)
    source = tl.load(reads + row).to(tl.int64)
    if first > 0:
        source = tl.load(piece_slot + own).to(tl.int64)
    state = tl.load(states + source * slot_stride + at, mask=inside & (source >= 0), other=0.0)
    for piece in range(tl.load(pieces + row), own + 1):
        end, start = tl.load(piece_end + piece), tl.load(piece_start + piece)
        begin = tl.load(piece_chunk + piece)
        until = begin + tl.cdiv(end - start, chunk)
        for at_chunk in tl.range(tl.maximum(first - begin, 0), tl.minimum(until, last) - begin, num_stages=stages):
            here, token = (begin + at_chunk).to(tl.int64), (start + at_chunk * chunk).to(tl.int64)
            unit = units + here * (heads // group * 2 * chunk * block_k) + of_key
            system = systems + (here * heads + head) * 2 * chunk * chunk
            line = factors + (here * heads + head) * 2 * chunk
            valid = (i < end - start - at_chunk * chunk)[:, None] & (vs < dv)[None, :]
            since, whole = tl.load(line + i)[None, :], tl.load(line + chunk - 1)
            key, carried = tl.load(unit + unit_at), state.to(dtype)
            seen = tl.dot(carried, tl.trans(key), input_precision="ieee")
            value = tl.load(v + token * v_stride + (i[:, None] * v_stride + of_value), mask=valid, other=0.0)
            # A product with the identity takes V from shared memory, to which it is copied ahead of time.
            wanted = tl.dot(tl.trans(value), eye, seen * (-since), input_precision="ieee").to(dtype)
            both = tl.dot(wanted, tl.trans(tl.load(system + system_at)), input_precision="ieee")
            change, said = tl.split(tl.permute(both.reshape(block_v, 2, chunk), (0, 2, 1)))
            rest = (change * tl.load(line + chunk + i)[None, :]).to(dtype)
            state = tl.dot(rest, key, state * whole, input_precision="ieee")
            query = tl.load(unit + chunk * block_k + unit_at)
            said = (said + tl.dot(carried, tl.trans(query), input_precision="ieee") * since).to(out.dtype.element_ty)
            tl.store(out + token * heads * dv + (i[:, None] * heads * dv + of_value), tl.trans(said), mask=valid)
        target = tl.load(piece_slot + piece).to(tl.int64)
        if (target >= 0) & (first <= until) & ((until <= last) | (piece == own)):
            tl.store(states + target * slot_stride + at, state, mask=inside)


@dataclass(frozen=True, slots=True)
class Solved:
    """What chunks do that does not depend on a state."""

    units: Tensor  # [chunks, Hk, 2, C, dk, a power of 2]: K and Q
    systems: Tensor  # [chunks, Hv, 2, C, C]: X and P X
    factors: Tensor  # [chunks, Hv, 2, C]: exp(G), and exp(G_C − G)


def advance_long(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, out: Tensor, states: Tensor, long: Long
) -> None:
    """Rows of many tokens, from the slots they read to those of their pieces; the outputs go to `out`."""
    for each in (q, k, v):
        assert each.stride(2) == 1 and each.stride(1) == each.shape[2]
    assert states.stride()[1:] == (k.shape[2] * v.shape[2], v.shape[2], 1) and out.is_contiguous()
    chunks = len(long.chunk_start)
    solved, step = room(k, g, chunks), chunks
    if len(long.read) == 1:
        step = SEGMENT if chunks <= 4 * SEGMENT else 2 * SEGMENT  # of many, or launching them takes longer than they do
    segments = [(first, min(first + step, chunks)) for first in range(0, chunks, step)]
    if len(segments) == 1 or not k.is_cuda:
        for segment in segments:
            solve(q, k, g, beta, long, solved, segment)
            carry(v, out, states, long, solved, segment)
        return
    here, aside = torch.cuda.current_stream(k.device), _aside(k.device)
    for segment in segments:
        solve(q, k, g, beta, long, solved, segment)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            carry(v, out, states, long, solved, segment)
    here.wait_stream(aside)


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """What waits for something solved goes first, or it would only start when all is."""
    return torch.cuda.Stream(device, priority=-1)


def room(k: Tensor, g: Tensor, chunks: int) -> Solved:
    (_, k_heads, dk), heads, chunk = k.shape, g.shape[1], chunk_tokens(k.dtype)
    block_k = max(16, triton.next_power_of_2(dk))
    empty = partial(torch.empty, dtype=torch.float32 if k.dtype == torch.float32 else torch.float16, device=k.device)
    return Solved(
        empty(chunks, k_heads, 2, chunk, block_k),
        empty(chunks, heads, 2, chunk, chunk),
        empty(chunks, heads, 2, chunk, dtype=torch.float32),
    )


def solve(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, long: Long, solved: Solved, segment: tuple[int, int]) -> None:
    (_, k_heads, dk), heads, (first, last) = k.shape, g.shape[1], segment
    chunk, block_k = solved.units.shape[3:]
    exact = k.dtype == torch.float32
    assert g.stride(1) == beta.stride(1) == 1
    _systems[heads, last - first](
        q, k, g, beta, solved.units, solved.systems, solved.factors, long.chunk_start, long.chunk_count, first,
        dk**-0.5, q.stride(0), k.stride(0), g.stride(0), beta.stride(0),
        heads=heads, group=heads // k_heads, dk=dk, block_k=block_k, chunk=chunk,
        num_warps=8 if exact else 4, maxnreg=255 if exact else REGISTERS,
    )  # fmt: skip


def carry(v: Tensor, out: Tensor, states: Tensor, long: Long, solved: Solved, segment: tuple[int, int]) -> None:
    """The states from chunk to chunk, and the outputs."""
    (_, heads, dk, dv), (_, k_heads, _, chunk, block_k) = states.shape, solved.units.shape
    exact = solved.units.dtype == torch.float32
    block_v = 16 if exact else max(16, min(64, triton.next_power_of_2(dv)))
    programs = heads * triton.cdiv(dv, block_v)
    numbers = chunk * (2 * block_k + 2 * chunk + block_v)  # of one chunk on its way
    fit = (shared_bytes(v.device) - ASIDE) // (numbers * solved.units.dtype.itemsize)
    _pass[programs, len(long.read)](
        solved.units, v, out, states, solved.systems, solved.factors,
        long.read, long.pieces, long.start, long.end, long.slot, long.first_chunk, *segment, states.stride(0),
        v_stride=v.stride(0), heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=block_k, block_v=block_v,
        chunk=chunk, stages=max(1, min(3, fit)), num_warps=8 if exact else 4,
        maxnreg=255,  # or float32 is given 32, and waits for memory
    )  # fmt: skip
