"""What attention layers do to their heads, and recorded gated-delta layers, in Triton: against their reference twins.

The reference runs on the CPU. test_triton.py runs these in the interpreter where there is no GPU.
"""

from dataclasses import replace

import pytest
import torch
from test_delta import close
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers, pool
from torch import Tensor

from bough import ops
from bough.ops import DeltaLayer, Norm, Pages, Rows, Slots
from bough.ops.ragged import Recording

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops import triton as twin
    from bough.ops.triton import heads as kernel

TOKENS, PAGES, SIZE = 5, 7, 4


def norm_of(kind: str, width: int, dtype: torch.dtype) -> Norm | None:
    weight = 1 + torch.randn(width) / 4
    made = {"rounded": (weight.to(dtype), 1e-6, True), "scaled": (weight, 1e-6, False), "bare": (None, 1e-6, True)}
    return Norm(*made[kind]) if kind in made else None


def there(norm: Norm | None) -> Norm | None:
    return norm if norm is None or norm.weight is None else replace(norm, weight=norm.weight.to(DEVICE))


def rotation_of(rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(TOKENS, 1, rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def pages_of(heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, index: torch.dtype) -> tuple[Pages, Pages]:
    """The same twice, there and here. Two tokens of padding go to one place, the others each to its own."""
    page, at = torch.tensor([3, 0, 3, 6, 6], dtype=index), torch.tensor([1, 2, 0, 3, 3], dtype=index)
    k, v = (pool(PAGES, SIZE, heads, dim, dtype=dtype) for dim in (k_dim, v_dim))
    here = Pages(k.cpu().clone(), v.cpu().clone(), page[:0], (), page, at)
    return Pages(k, v, page[:0], (), page.to(DEVICE), at.to(DEVICE)), here


def same(ours: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}[expected.dtype]
    torch.testing.assert_close(ours.cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("kinds", [("none",) * 3, ("rounded", "rounded", "none"), ("scaled", "scaled", "bare")])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_dim", "v_dim", "rotated", "numbers"),
    [
        (6, 2, 24, 24, 24, 1024),
        (3, 3, 40, 16, 12, 1024),
        (0, 3, 40, 16, 12, 1024),
        (5, 1, 16, 32, 4, 32),
        (8, 2, 256, 256, 64, 1024),
    ],
)
def test_heads(monkeypatch, heads, kv_heads, k_dim, v_dim, rotated, numbers, kinds, dtype):
    monkeypatch.setattr(kernel, "NUMBERS", numbers)
    q = torch.randn(TOKENS, heads, 2 * k_dim).to(dtype)  # the second half is a gate
    beside = torch.randn(TOKENS, kv_heads * (k_dim + v_dim)).to(dtype)
    beside[3:] = torch.nan  # padding
    rotation, (pages, expected) = rotation_of(rotated, dtype), pages_of(kv_heads, k_dim, v_dim, dtype, torch.int32)
    norms = tuple(norm_of(kind, dim, dtype) for kind, dim in zip(kinds, (k_dim, k_dim, v_dim), strict=True))

    def given(place: str) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        k, v = beside.to(place).split([kv_heads * k_dim, kv_heads * v_dim], 1)
        kv = k.view(TOKENS, kv_heads, k_dim), v.view(TOKENS, kv_heads, v_dim)
        return q.to(place)[..., :k_dim], tuple(each.to(place) for each in rotation), kv

    queries, turns, kv = given("cpu")
    want = ops.place_heads(queries, turns, kv=kv, pages=expected, norms=norms)
    queries, turns, kv = given(DEVICE)
    ours = twin.place_heads(queries, turns, kv=kv, pages=pages, norms=tuple(map(there, norms)))
    assert ours.is_contiguous()
    for mine, other in ((ours, want), (pages.k, expected.k), (pages.v, expected.v)):
        same(mine, other)
    same(twin.place_heads(queries, turns, norms=tuple(map(there, norms))), want)  # queries alone


@kernels
def test_heads_into_pages_of_another_dtype():
    q, k, turns = torch.randn(TOKENS, 4, 16), torch.randn(TOKENS, 2, 16), rotation_of(8, torch.float32)
    k[3:] = torch.nan  # padding, of which two go to one place, in any order
    pages, expected = pages_of(2, 16, 16, LOW, torch.int64)
    ops.place_heads(q, turns, kv=(k, k), pages=expected)
    k, turns = k.to(DEVICE), tuple(each.to(DEVICE) for each in turns)
    twin.place_heads(q.to(DEVICE), turns, kv=(k, k), pages=pages)
    same(pages.k, expected.k)
    same(pages.v, expected.v)


def test_keys_and_values_need_pages():
    q = torch.randn(1, 2, 4)
    with pytest.raises(ValueError, match="pages"):
        ops.place_heads(q, (q, q), kv=(q, q))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(("half", "factor"), [(12, 1.0), (5, 1.25)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rotations(half, factor, index, dtype):
    """Positions far out too: there, angles are as exact as in the reference."""
    positions = torch.tensor([0, 1, 37, 4095, 131_071, 1_000_003], dtype=index)
    frequencies = 1e6 ** -(torch.arange(half) / half)
    ours = twin.rotations(positions.to(DEVICE), frequencies.to(DEVICE), factor, dtype)
    for mine, other in zip(ours, ops.rotations(positions, frequencies, factor, dtype), strict=True):
        assert mine.is_contiguous() and mine.dtype == dtype
        same(mine, other)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("weak", [False, True])  # decays so weak that they are lost where 1 is added
def test_a_recorded_delta_layer(weak, dtype):
    rows, recorded = Rows((2, 1, 11), (1, 4, 3)), (True, False, True)
    k_heads, heads, dk, dv = 2, 4, 16, 8
    widths = (2 * k_heads * dk + heads * dv, heads * dv, heads, heads)
    projected = [torch.randn(rows.total, width).to(dtype) for width in widths]
    rate, dt_bias, norm = (torch.randn(shape) for shape in (heads, heads, dv))
    weights, states = (-rate.abs(), dt_bias - 16 * weak, norm.to(dtype)), pool(6, heads, dk, dv)

    def run(op, place: str, states: Tensor) -> tuple[Tensor, Slots]:
        slots = Slots(states, (1, 2, 3), (0, 2, 0), (), recorded, Recording())
        layer = DeltaLayer(*(each.to(place) for each in weights), 1e-6)
        return op(*(each.to(place) for each in projected), layer, k_heads, rows, slots), slots

    want, theirs = run(ops.gated_delta_layer, "cpu", states.cpu().clone())
    out, ours = run(twin.gated_delta_layer, DEVICE, states)
    loose = dtype != torch.float32  # of low precision, a rounding or two
    close(out.cpu(), want, 4e-2 if loose else 2e-5)
    close(ours.data[1:].cpu(), theirs.data[1:], 5e-3 if loose else 2e-5)  # all but the scratch slot
    assert ours.recording.tokens == 13
    for mine, other in zip(ours.recording.inputs, theirs.recording.inputs, strict=True):
        close(mine.cpu(), other, 1e-2 if loose else 2e-5)
    g, exact = (each.recording.inputs[1].cpu().double() for each in (ours, theirs))
    assert ((g - exact).abs() <= 1e-5 * exact.abs()).all()
