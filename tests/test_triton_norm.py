"""The Triton kernels of norms and gates against their reference twins; test_triton.py runs them in the interpreter
where there is no GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers
from torch import Tensor

from bough import ops
from bough.ops import Norm

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops import triton as twin
    from bough.ops.triton.norm import as_heads

DTYPES = [torch.float32, LOW]
GATES = [F.silu, ops.gelu_tanh, torch.sigmoid]
NORMS = [(True, True), (False, True), (True, False)]  # scaled, rounded


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel leaves out of its output is seen."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *of, **options: empty_like(*of, **options).fill_(torch.nan))


def rows(dtype: torch.dtype, width: int) -> list[Tensor]:
    """As models have them: rows, rows of a wider projection, heads within one, heads beside their gates; and none."""
    wide = torch.randn(5, 3, 2 * width)
    wide[1] *= 100
    wide[2] *= 1e-3
    wide[3] = 0
    wide[4] = torch.nan  # as behind a text: no other row may see it
    wide = wide.to(DEVICE, dtype)
    inside = wide.flatten(1)[:, width : 4 * width].view(5, 3, width)
    rows = [wide[:, 0, :width].contiguous(), wide[:, 1, :width]]
    return [*rows, inside, wide.chunk(2, -1)[0], wide[0, 0], wide[:0], wide[:0, 0]]


def norm(width: int, dtype: torch.dtype, scaled: bool, rounded: bool) -> Norm:
    weight = torch.randn(width).to(DEVICE, dtype if rounded else torch.float32) if scaled else None
    return Norm(weight, 1e-5, rounded)


def on_cpu(of: Norm) -> Norm:
    return Norm(None if of.weight is None else of.weight.cpu(), of.eps, of.rounded)


def close(ours: Tensor, expected: Tensor) -> None:
    """Equal up to a last digit, which the root or the exponential may differ in."""
    assert ours.is_contiguous() and ours.dtype == expected.dtype
    digit = 2e-6 if ours.dtype == torch.float32 else 2 * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.cpu(), expected, rtol=digit, atol=1e-7, equal_nan=True)


@kernels
@pytest.mark.parametrize("width", [1, 20, 64, 1100])
@pytest.mark.parametrize(("scaled", "rounded"), NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype, scaled, rounded, width):
    for x in rows(dtype, width):
        by = norm(x.shape[-1], dtype, scaled, rounded)
        close(twin.norm(x, by), on_cpu(by)(x.cpu()))


@kernels
@pytest.mark.parametrize("width", [20, 1100])
@pytest.mark.parametrize(("scaled", "rounded"), NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_sums(dtype, scaled, rounded, width):
    by = norm(width, dtype, scaled, rounded)
    dense, within, *_ = rows(dtype, width)
    for x, y in ((dense, torch.randn_like(dense)), (dense, within), (within, dense), (dense[:0], dense[:0])):
        for ours, expected in zip(twin.norm_after(x, y, by), on_cpu(by).after(x.cpu(), y.cpu()), strict=True):
            close(ours, expected)


@kernels
@pytest.mark.parametrize("width", [20, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norms(dtype, width):
    for x in rows(dtype, width):
        gate = (3 * torch.randn(*x.shape[:-1], 2 * x.shape[-1])).to(DEVICE, dtype)[..., x.shape[-1] :]
        weight = torch.randn(x.shape[-1]).to(DEVICE, dtype)
        close(twin.rms_norm_gated(x, gate, weight, 1e-6), ops.rms_norm_gated(x.cpu(), gate.cpu(), weight.cpu(), 1e-6))


@kernels
@pytest.mark.parametrize("width", [20, 64, 1100])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype, activation, width):
    """With the activation in float64: in float32, the reference for gelu has no digits left where it is small."""
    for value in rows(dtype, width):
        gate = (4 * torch.randn(*value.shape[:-1], 2 * value.shape[-1])).to(DEVICE, dtype)[..., value.shape[-1] :]
        close(twin.gated(gate, value, activation), activation(gate.cpu().double()).to(dtype) * value.cpu())


@pytest.mark.parametrize("activation", [*GATES, F.gelu])
def test_the_reference_of_gates(activation):
    gate, value = torch.randn(4, 3, 16)[..., 8:], torch.randn(4, 3, 8)
    assert torch.equal(ops.gated(gate, value, activation), activation(gate) * value)


@kernels
def test_what_lies_densely_in_heads_is_not_copied():
    wide = torch.randn(5, 3, 16).to(DEVICE)
    for x in (wide, wide[:, 0], wide[..., :8], wide.flatten(1)[:, 8:40].view(5, 2, 16)):
        assert as_heads(x).data_ptr() == x.data_ptr()
