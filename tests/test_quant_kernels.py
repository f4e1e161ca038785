"""The Triton kernels for weights of few bits against their reference twins; test_triton.py runs them in the
interpreter where there is no GPU.
"""

import pytest
import torch
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers

from bough.models.rounding import quantised
from bough.ops import Quantised

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops.triton import quant as twin

SHAPES = [(70, 96, 1), (64, 576, 5), (130, 512, 20), (33, 48, 16), (1, 128, 64), (192, 640, 33)]


@kernels
@pytest.mark.parametrize("part", [128, 1024])  # with the inputs cut into several, and in one
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
def test_products(monkeypatch, outputs, inputs, rows, bits, dtype, part):
    monkeypatch.setattr(twin, "PART", part)
    made = quantised(torch.randn(outputs, inputs), bits)
    beside = [each.to(DEVICE, dtype) for each in (made.scale, made.zero) if each is not None]
    weight = Quantised(made.data.to(DEVICE), *beside)
    x = torch.randn(rows, inputs + 8).to(DEVICE, dtype)[:, 8:]
    plain = Quantised(made.data, *(each.cpu().float() for each in beside)).expanded()
    wide = twin.expanded(weight.data, weight.scale, weight.zero).cpu().float()
    assert (wide - plain).abs().max() <= (0 if dtype == torch.float32 else 2**-8) * plain.abs().max()
    ours = twin.quantised_product(x, weight.data, weight.scale, weight.zero).cpu().float()
    exact = x.cpu().double() @ plain.double().T
    assert (ours - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2) * exact.abs().max()
    alone = twin.quantised_product(x[:1], weight.data, weight.scale, weight.zero).cpu().float()
    assert (alone - ours[:1]).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-2) * exact.abs().max()
