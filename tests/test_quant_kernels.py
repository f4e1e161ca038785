"""The Triton kernels for weights of few bits against their reference twins; test_triton.py runs them in the
interpreter where there is no GPU.
"""

import pytest
import torch
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers

from bough.models.rounding import quantised
from bough.ops import Quantised
from bough.ops.quant import in_chunks

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops.triton import quant as twin

SHAPES = [(19, 96, 1), (32, 288, 5), (37, 128, 20), (1, 64, 64), (3, 1056, 3)]


def test_words_have_the_codes_in_the_order_said():
    for bits, per, added in ((8, 4, 128), (4, 8, 0)):
        weight = quantised(torch.randn(3, 64), bits)
        words = in_chunks(weight).view(3, -1, 4)
        found = torch.stack([words >> bits * i & (1 << bits) - 1 for i in range(per)], 2).flatten(1)
        assert torch.equal(found, weight.codes().flatten(-2).to(torch.int32) + added)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
def test_products(outputs, inputs, rows, bits, dtype):
    made = quantised(torch.randn(outputs, inputs), bits)
    beside = [each.to(DEVICE, dtype) for each in (made.scale, made.zero) if each is not None]
    weight = in_chunks(made).to(DEVICE), beside[0], beside[1] if bits == 4 else None
    x = torch.randn(rows, inputs + 8).to(DEVICE, dtype)[:, 8:]
    plain = Quantised(made.data, *(each.cpu().float() for each in beside)).expanded()
    wide = twin.expanded(*weight).cpu().float()
    assert (wide - plain).abs().max() <= (1e-6 if dtype == torch.float32 else 2**-8) * plain.abs().max()
    exact = x.cpu().double() @ plain.double().T
    near = (1e-5 if dtype == torch.float32 else 1e-2) * exact.abs().max()
    assert (twin.quantised_product(x, *weight).cpu().float() - exact).abs().max() <= near
    assert (twin.quantised_product(x[:1], *weight).cpu().float() - exact[:1]).abs().max() <= near
    for cut in (twin.Cut(16, 1, 2), twin.Cut(16, 1, 2, 3)):  # all inputs by one program, and by several
        assert (twin.product(x, *weight, cut).cpu().float() - exact).abs().max() <= near
    if rows <= twin.ROWS:
        assert (twin.vectors(x, *weight, twin.Cut(4, 2, 1)).cpu().float() - exact).abs().max() <= near
