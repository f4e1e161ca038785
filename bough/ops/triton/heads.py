# mypy: allow-untyped-defs, allow-incomplete-defs
"""What lies between an attention layer's projection and attention: rotations, once a step; norms, turns and stores.

A program takes a few heads of one token, all of them queries, keys or values. A dimension turns together with another:
that one is loaded a second time, which the cache answers, and normed again, so that threads need not exchange any.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.norm import Norm
from bough.ops.ragged import Pages
from bough.ops.triton.follow import follow, lead, pass_on, passing_on

NUMBERS = 1024  # that a program takes: with 4 warps, 16 bytes a thread in 16 bits


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _scaled(x, root, by, rounded: tl.constexpr, dtype: tl.constexpr):
    """x times its head's factor and the weight, rounded where ops.Norm rounds."""
    x *= root
    if rounded:
        x = _rounded(x, dtype)
    return _rounded(x * by, dtype)


@triton.jit
def _weights(weight, column, inside):
    return 1.0 if weight is None else tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _placed(
    x, out, x_stride, out_stride, first, cos, sin, weight, eps, rounded: tl.constexpr,
    heads: tl.constexpr, width: tl.constexpr, rotated: tl.constexpr, each: tl.constexpr, block: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    """Heads from `first` on of the token that x, out, cos and sin point to; not normed where `rounded` is None.

    Weights are asked for before it follows.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    head = first + tl.arange(0, each)[:, None]
    # Heads load what they share each for itself: so it lies with the thread that needs it, and no thread waits.
    column = tl.broadcast_to(tl.arange(0, block)[None, :], (each, block))
    inside, turning = (head < heads) & (column < width), column < rotated
    partner = tl.where(column < rotated // 2, column + rotated // 2, column - rotated // 2)
    by, by_other = _weights(weight, column, column < width), _weights(weight, partner, turning)
    follow(follows)
    x += head * x_stride
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if rounded is not None:
        root = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        value = _scaled(value, root, by, rounded, dtype)
    if rotated:
        other = tl.load(x + partner, mask=inside & turning, other=0.0).to(tl.float32)
        if rounded is not None:
            other = _scaled(other, root, by_other, rounded, dtype)
        # What does not turn is turned by nothing.
        along = tl.load(cos + column, mask=turning, other=1.0).to(tl.float32)
        across = tl.load(sin + column, mask=turning, other=0.0).to(tl.float32)
        value = _rounded(_rounded(value * along, dtype) + _rounded(other * across, dtype), dtype)
    tl.store(out + head * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["write_page", "write_at"])
def _place_heads(
    q, k, v, out, k_pages, v_pages, write_page, write_at, cos, sin, q_weight, k_weight, v_weight, q_eps, k_eps, v_eps,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    k_page, k_at, k_out_head, v_page, v_at, v_out_head,
    q_rounded: tl.constexpr, k_rounded: tl.constexpr, v_rounded: tl.constexpr,
    heads: tl.constexpr, kv_heads: tl.constexpr, k_width: tl.constexpr, v_width: tl.constexpr, rotated: tl.constexpr,
    each: tl.constexpr, block: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """Without kv_heads there are queries alone, and without heads none."""
    lead(follows)
    q_programs, kv_programs = tl.cdiv(heads, each), tl.cdiv(kv_heads, each)
    programs = q_programs + 2 * kv_programs
    token, part = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    cos, sin = cos + token * rotated, sin + token * rotated
    if part < q_programs:
        _placed(
            q + token * q_stride, out + token * heads * k_width, q_head, k_width, part * each, cos, sin,
            q_weight, q_eps, q_rounded, heads, k_width, rotated, each, block, follows,
        )  # fmt: skip
    elif kv_heads:
        page, at = tl.load(write_page + token).to(tl.int64), tl.load(write_at + token).to(tl.int64)
        if part < q_programs + kv_programs:
            _placed(
                k + token * k_stride, k_pages + page * k_page + at * k_at, k_head, k_out_head,
                (part - q_programs) * each, cos, sin,
                k_weight, k_eps, k_rounded, kv_heads, k_width, rotated, each, block, follows,
            )  # fmt: skip
        else:
            _placed(
                v + token * v_stride, v_pages + page * v_page + at * v_at, v_head, v_out_head,
                (part - q_programs - kv_programs) * each, cos, sin,
                v_weight, v_eps, v_rounded, kv_heads, v_width, 0, each, block, follows,
            )  # fmt: skip


def place_heads(
    q: Tensor,
    rotation: tuple[Tensor, Tensor],
    *,
    kv: tuple[Tensor, Tensor] | None = None,
    pages: Pages | None = None,
    norms: tuple[Norm | None, Norm | None, Norm | None] = (None, None, None),
) -> Tensor:
    """The twin of ops.place_heads."""
    (total, heads, width), (cos, sin) = q.shape, rotation
    k, v = kv or (None, None)
    out = q.new_empty(q.shape)
    stored: tuple[Tensor | None, ...] = (None,) * 4
    strides, kv_heads, v_width = [0] * 10, 0, width
    if k is not None and v is not None:
        assert pages is not None
        stored, kv_heads, v_width = (pages.k, pages.v, pages.write_page, pages.write_at), k.shape[1], v.shape[2]
        strides = [*k.stride()[:2], *v.stride()[:2], *pages.k.stride()[:3], *pages.v.stride()[:3]]
    assert all(each is None or each.stride(-1) == 1 for each in (q, k, v, *stored[:2]))
    assert cos.is_contiguous() and sin.is_contiguous()
    block = triton.next_power_of_2(max(width, v_width))
    each = min(max(1, NUMBERS // block), triton.next_power_of_2(max(1, heads, kv_heads)))
    programs = triton.cdiv(heads, each) + 2 * triton.cdiv(kv_heads, each)
    if total * programs:
        _place_heads[(total * programs,)](
            q, k, v, out, *stored, cos, sin,
            *(norm and norm.weight for norm in norms), *(norm.eps if norm else 0.0 for norm in norms),
            *q.stride()[:2], *strides, *(norm.rounded if norm else None for norm in norms),
            heads=heads, kv_heads=kv_heads, k_width=width, v_width=v_width, rotated=cos.shape[-1],
            each=each, block=block, num_warps=4, **passing_on(q.device, total),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotations(
    positions, frequencies, cos, sin, factor, half: tl.constexpr, block: tl.constexpr, follows: tl.constexpr
):  # fmt: skip
    pass_on(follows)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = column < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, mask=inside, other=0.0)
    at = token * 2 * half + column
    along, across = tl.cos(angle) * factor, tl.sin(angle) * factor
    tl.store(cos + at, along, mask=inside)
    tl.store(cos + at + half, along, mask=inside)
    tl.store(sin + at, -across, mask=inside)
    tl.store(sin + at + half, across, mask=inside)


def rotations(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The twin of ops.rotations."""
    total, half = len(positions), len(frequencies)
    cos, sin = (frequencies.new_empty(total, 1, 2 * half, dtype=dtype) for _ in range(2))
    if total:
        _rotations[(total,)](
            positions, frequencies, cos, sin, factor, half=half, block=triton.next_power_of_2(half), num_warps=1,
            **passing_on(positions.device, total),
        )  # fmt: skip
    return cos, sin
