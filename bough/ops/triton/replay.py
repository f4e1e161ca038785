# mypy: allow-untyped-defs, allow-incomplete-defs
"""Recorded inputs applied to slots: all layers and all rows in one launch for each kind of part.

Layers have their tensors wherever they were made, so kernels are given their addresses.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Replayed, ReplayedRow
from bough.ops.sent import sent

CARRIED = 2048  # numbers that a warp carries
CHANNELS = 512


@triton.jit
def _replay_delta(
    addresses, slots, starts, counts, slot_stride, k_stride, g_stride, change_stride, key_type: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = (dv + block_v - 1) // block_v
    layer, row = tl.program_id(0) // (heads * slices), tl.program_id(1)
    head = tl.program_id(0) // slices % heads
    ks, vs = tl.arange(0, block_k), tl.program_id(0) % slices * block_v + tl.arange(0, block_v)
    states = tl.load(addresses + layer * 4).to(tl.pointer_type(tl.float32))
    k = tl.load(addresses + layer * 4 + 1).to(tl.pointer_type(key_type))
    g = tl.load(addresses + layer * 4 + 2).to(tl.pointer_type(tl.float32))
    changes = tl.load(addresses + layer * 4 + 3).to(tl.pointer_type(tl.float32))
    at = tl.load(slots + row) * slot_stride + head * dk * dv + ks[:, None] * dv + vs[None, :]
    inside, start = (ks < dk)[:, None] & (vs < dv)[None, :], tl.load(starts + row)
    state = tl.load(states + at, mask=inside, other=0.0)
    for t in range(start, start + tl.load(counts + row)):
        key = tl.load(k + t * k_stride + head // group * dk + ks, mask=ks < dk, other=0.0).to(tl.float32)
        change = tl.load(changes + t * change_stride + head * dv + vs, mask=vs < dv, other=0.0)
        state = state * tl.exp(tl.load(g + t * g_stride + head)) + key[:, None] * change[None, :]
    tl.store(states + at, state, mask=inside)


@triton.jit
def _replay_conv(
    addresses, slots, starts, counts, slot_stride, tail_stride, x_stride, channels,
    tail_type: tl.constexpr, input_type: tl.constexpr, keep: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, block)
    layer, row = tl.program_id(0) // blocks, tl.program_id(1)
    channel = tl.program_id(0) % blocks * block + tl.arange(0, block)
    tails = tl.load(addresses + layer * 2).to(tl.pointer_type(tail_type)) + tl.load(slots + row) * slot_stride + channel
    x = tl.load(addresses + layer * 2 + 1).to(tl.pointer_type(input_type)) + channel
    start, count = tl.load(starts + row), tl.load(counts + row)
    inside = channel < channels
    for i in tl.static_range(keep):  # what is written here is not read again
        at = count + i
        old = tl.load(tails + at * tail_stride, mask=inside & (at < keep), other=0.0)
        new = tl.load(x + (start + at - keep) * x_stride, mask=inside & (at >= keep), other=0.0)
        tl.store(tails + i * tail_stride, tl.where(at < keep, old.to(new.dtype), new), mask=inside)


def _numbers(layers: Sequence[Replayed], rows: Sequence[ReplayedRow], device: torch.device) -> list[Tensor]:
    """The addresses of the layers' tensors, and the rows' slots, starts and counts."""
    addresses = tuple(each.data_ptr() for data, inputs in layers for each in (data, *inputs))
    return [_sent(addresses, device), *_sent(tuple(zip(*rows, strict=True)), device).unbind()]


@lru_cache(16)
def _sent(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """On the device; what was recorded in a graph is at the same addresses every time."""
    return sent(torch.tensor(numbers), device)


def replay_delta(layers: Sequence[Replayed], rows: Sequence[ReplayedRow]) -> None:
    """The twin of ops.replay_delta."""
    states, (k, g, change) = layers[0]
    (_, heads, dk, dv), k_heads = states.shape, k.shape[1]
    assert k.stride()[1:] == (dk, 1) and g.stride(1) == 1 and change.stride()[1:] == (dv, 1)
    assert states.stride()[1:] == (dk * dv, dv, 1)
    block_k = triton.next_power_of_2(dk)
    block_v = max(1, min(triton.next_power_of_2(dv), CARRIED // block_k))
    _replay_delta[len(layers) * heads * triton.cdiv(dv, block_v), len(rows)](
        *_numbers(layers, rows, k.device), states.stride(0), k.stride(0), g.stride(0), change.stride(0),
        key_type=_type(k), heads=heads, group=heads // k_heads, dk=dk, dv=dv, block_k=block_k, block_v=block_v,
        num_warps=1,
    )  # fmt: skip


def replay_conv(layers: Sequence[Replayed], rows: Sequence[ReplayedRow]) -> None:
    """The twin of ops.replay_conv."""
    tails, (x,) = layers[0]
    _, keep, channels = tails.shape
    assert x.stride(1) == tails.stride(2) == 1
    _replay_conv[len(layers) * triton.cdiv(channels, CHANNELS), len(rows)](
        *_numbers(layers, rows, x.device), tails.stride(0), tails.stride(1), x.stride(0), channels,
        tail_type=_type(tails), input_type=_type(x), keep=keep, block=CHANNELS,
    )  # fmt: skip


def _type(tensor: Tensor):
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensor.dtype]
