"""The Triton kernels for weights of few bits against their reference twins; test_triton.py runs them in the
interpreter where there is no GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers
from test_triton_experts import poisoned_memory

from bough import ops
from bough.models.rounding import quantised
from bough.ops import Quantised
from bough.ops.quant import BLOCK, in_chunks, in_steps

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops.triton import quant as twin
    from bough.ops.triton.arrivals import arrivals

SHAPES = [(19, 96, 1), (32, 288, 5), (37, 128, 20), (1, 64, 64), (3, 1056, 3)]


def test_words_have_the_codes_in_the_order_said():
    for bits, per, added in ((8, 4, 128), (4, 8, 0)):
        weight = quantised(torch.randn(3, 64), bits)
        words = in_chunks(weight).view(3, -1, 4)
        found = torch.stack([words >> bits * i & (1 << bits) - 1 for i in range(per)], 2).flatten(1)
        assert torch.equal(found, weight.codes().flatten(-2).to(torch.int32) + added)


def made(outputs: int, inputs: int, bits: int, dtype: torch.dtype):
    """Data and steps of chunks, and the same weights in full."""
    small = quantised(torch.randn(outputs, inputs), bits)
    beside = [each.to(dtype) for each in (small.scale, small.zero) if each is not None]
    plain = Quantised(small.data, *(each.float() for each in beside)).expanded()
    weight = in_chunks(small).to(DEVICE), in_steps(Quantised(small.data, *beside)).to(DEVICE)
    return weight, plain.to(DEVICE)


def inputs_of(rows: int, inputs: int, dtype: torch.dtype):
    """A part of wider rows, the last of which is NaN as the padding of a step may be."""
    x = torch.randn(rows, inputs + 8).to(DEVICE, dtype)[:, 8:]
    if rows > 1:
        x[-1] = torch.nan
    return x


def near(ours, exact, dtype):
    """But for the row that is padding."""
    kept = slice(0, max(1, len(ours) - 1))
    error = (ours.double() - exact)[kept].abs().max()
    assert ours.shape == exact.shape and ours.dtype == dtype
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2) * exact[kept].abs().max()


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
def test_products(outputs, inputs, rows, bits, dtype):
    weight, plain = made(outputs, inputs, bits, dtype)
    wide = twin.expanded(*weight).float()
    assert (wide - plain).abs().max() <= (1e-6 if dtype == torch.float32 else 2**-8) * plain.abs().max()
    x = inputs_of(rows, inputs, dtype)
    exact = x.double() @ plain.double().T
    with poisoned_memory():
        near(twin.quantised_product(x, *weight), exact, dtype)
        near(twin.quantised_product(x[:1], *weight), exact[:1], dtype)
        for cut in (twin.Cut(16, 4, 2), twin.Cut(32, 4, 1, 1, 3)):  # all inputs by one program, and by several
            near(twin.product(x, *weight, cut), exact, dtype)
        for cut in (twin.Cut(8, 16, 2), twin.Cut(4, 64, 1, 2)):
            near(twin.vector(x[:1], *weight, cut), exact[:1], dtype)
    assert arrivals(x.device).count_nonzero() == 0


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plain_weight_beside(rows, bits, dtype):
    weight, plain = made(BLOCK, 160, bits, dtype)
    beside, x = torch.randn(37, 160).to(DEVICE, dtype), inputs_of(rows, 160, dtype)
    exact = x.double() @ torch.cat([plain, beside]).double().T
    with poisoned_memory():
        near(twin.quantised_product(x, *weight, beside), exact, dtype)


@kernels
@pytest.mark.parametrize("activation", [F.silu, ops.gelu_tanh])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("rows", [1, 3])
def test_gated_products(rows, dtype, activation):
    weight, plain = made(70, 160, 4, dtype)
    x = inputs_of(rows, 160, dtype)
    gate, up = (x.double() @ plain.double().T).chunk(2, -1)
    with poisoned_memory():
        near(twin.quantised_product(x, *weight, None, activation), activation(gate) * up, dtype)


@kernels
@pytest.mark.parametrize("rows", [2, 8])
def test_a_row_does_not_depend_on_those_beside_it(rows):
    weight, _ = made(40, 288, 4, LOW)
    x = inputs_of(rows + 1, 288, LOW)[:rows]
    together = twin.quantised_product(x, *weight)
    x[1:] = torch.nan
    assert torch.equal(twin.quantised_product(x, *weight)[0], together[0])
