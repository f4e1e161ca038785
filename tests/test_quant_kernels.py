"""The Triton kernels for weights of few bits against their reference twins; test_triton.py runs them in the
interpreter where there is no GPU.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from test_fixed import by_kernels
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers
from test_triton_experts import poisoned_memory

from bough import ops
from bough.models.rounding import quantised
from bough.ops import Quantised, Rows, Slots
from bough.ops.deferred import Normed, Product
from bough.ops.quant import BLOCK, Chunks, chunks, in_chunks, in_steps

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops.triton import quant as twin
    from bough.ops.triton.arrivals import arrivals
    from bough.ops.triton.rest import Work

SHAPES = [(19, 96, 1), (32, 288, 5), (37, 128, 20), (1, 64, 64), (3, 1056, 3)]


def test_words_have_the_codes_in_the_order_said():
    for bits, per, added in ((8, 2, 128), (4, 4, 0)):
        weight = quantised(torch.randn(3, 64), bits)
        halves = in_chunks(weight).view(3, -1, 8).to(torch.int32)
        found = torch.stack([halves >> bits * i & (1 << bits) - 1 for i in range(per)], 2).flatten(1)
        assert torch.equal(found, weight.codes().flatten(-2).to(torch.int32) + added)


def made(outputs: int, inputs: int, bits: int, dtype: torch.dtype, beside: int = 0):
    """Chunks, with some outputs beside that have not been quantised; and the same weights in full."""
    small = quantised(torch.randn(outputs, inputs), bits)
    steps = [each.to(dtype) for each in (small.scale, small.zero) if each is not None]
    plain = torch.randn(beside, inputs).to(DEVICE, dtype)
    full = Quantised(small.data, *(each.float() for each in steps)).expanded().to(DEVICE)
    weight = Chunks(in_chunks(small).to(DEVICE), in_steps(Quantised(small.data, *steps)).to(DEVICE))
    return weight.above(plain) if beside else weight, torch.cat([full, plain.float()])


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
    weight, full = made(outputs, inputs, bits, dtype)
    wide = twin.expanded(weight).float()
    assert (wide - full).abs().max() <= (1e-6 if dtype == torch.float32 else 2**-8) * full.abs().max()
    x = inputs_of(rows, inputs, dtype)
    exact = x.double() @ full.double().T
    with by_kernels(), poisoned_memory():
        near(ops.linear(x, weight), exact, dtype)
        near(ops.linear(x[:1], weight), exact[:1], dtype)
        # all inputs by one program in rounds, by several, and by one at once
        for cut in (twin.Cut(16, 2, 2, 1), twin.Cut(32, 1, 2, 2, 3), twin.Cut(16, 1, 9, 2)):
            near(twin.product(x, Work(weight), cut).out, exact, dtype)
            near(twin.product(x[:1], Work(weight), cut).out, exact[:1], dtype)
    assert arrivals(x.device).count_nonzero() == 0


FORMS = pytest.mark.parametrize(
    ("bits", "rows", "beside", "dtype"),
    list(product((8, 4), (1, 5), (0, 13), (torch.float32, LOW))),
)


@kernels
@FORMS
def test_a_plain_weight_beside_and_a_bias(bits, rows, beside, dtype):
    weight, full = made(BLOCK, 160, bits, dtype, beside)
    x, bias = inputs_of(rows, 160, dtype), torch.randn(len(full)).to(DEVICE, dtype)
    with by_kernels(), poisoned_memory():
        near(ops.linear(x, weight, bias), x.double() @ full.double().T + bias.double(), dtype)


@kernels
@pytest.mark.parametrize("bits", [8, 4])
def test_a_plain_weight_beside_of_more_inputs_than_one_turn_takes(bits):
    weight, full = made(BLOCK, 8320, bits, LOW, 13)
    x = inputs_of(1, 8320, LOW)
    with by_kernels(), poisoned_memory():
        near(ops.linear(x, weight), x.double() @ full.double().T, LOW)


@kernels
def test_a_plain_weight_is_put_beside_where_that_is_one_launch():
    weight = quantised(torch.randn(BLOCK, 64), 4)
    plain = torch.randn(3, 64).to(weight.scale.dtype)
    with by_kernels():
        made = chunks(weight)
        pairs = (made, plain), (made[:30], plain), (made, plain.double()), (plain, made)
        whole, *others = (ops.arranged(ops.Parts(each)) for each in pairs)
    assert isinstance(whole, Chunks) and whole.shape == (35, 64)
    assert all(isinstance(each, ops.Parts) for each in others)


@kernels
@pytest.mark.parametrize("beside", [0, 5])
def test_products_of_many_rows(beside):
    weight, full = made(BLOCK, 96, 4, torch.float32, beside)
    x = inputs_of(twin.ROWS + 1, 96, torch.float32)
    with by_kernels():
        assert isinstance(ops.later(x, weight), torch.Tensor)
        near(ops.linear(x, weight), x.double() @ full.double().T, torch.float32)


@kernels
@FORMS
def test_gated_products(bits, rows, beside, dtype):
    weight, full = made(2 * BLOCK, 160, bits, dtype, 2 * beside)
    x = inputs_of(rows, 160, dtype)
    gate, up = (x.double() @ full.double().T).chunk(2, -1)
    with by_kernels(), poisoned_memory():
        near(ops.gated_linear(x, weight, None, ops.gelu_tanh), ops.gelu_tanh(gate) * up, dtype)


@kernels
@pytest.mark.parametrize("scaled", [True, False])
@FORMS
def test_half_a_norm_in_the_product_before_it(bits, rows, beside, dtype, scaled):
    weight, full = made(BLOCK, 160, bits, dtype, beside)
    x, onto = inputs_of(rows, 160, dtype), torch.randn(rows, len(full) + 8).to(DEVICE, dtype)[:, 8:]
    norm = ops.Norm(torch.randn(len(full), device=DEVICE) + 1 if scaled else None, 1e-6, rounded=False)
    product = x.double() @ full.double().T
    sums = onto.double() + product
    exact = sums * torch.rsqrt(sums.square().mean(-1, keepdim=True) + norm.eps)
    with by_kernels(), poisoned_memory():
        left = ops.later(x, weight)
        assert isinstance(left, torch.Tensor) == (dtype == torch.float16)  # which has too little range for it
        left = Product(x, weight)
        alone = ops.made(left)
        total, normed = norm.after(onto, left)
    assert isinstance(normed, Normed)
    near(alone, product, dtype)
    near(total, sums, dtype)
    near(normed.made(), exact * norm.weight.double() if scaled else exact, dtype)


@kernels
@pytest.mark.parametrize("activation", [None, F.silu])
@FORMS
def test_half_a_norm_in_the_product_after_it(bits, rows, beside, dtype, activation):
    weight, full = made(2 * BLOCK, 160, bits, dtype, 2 * beside)
    x, squares = inputs_of(rows, 160, dtype), torch.rand(5, rows, device=DEVICE) * 60
    exact = (x.double() * torch.rsqrt(squares.double().sum(0) / 160 + 0.1)[:, None]) @ full.double().T
    with by_kernels(), poisoned_memory():
        normed = Normed(x, squares, 0.1)
        if activation is None:
            near(ops.linear(normed, weight), exact, dtype)
        else:
            gate, up = exact.chunk(2, -1)
            near(ops.gated_linear(normed, weight, None, activation), activation(gate) * up, dtype)


@kernels
@pytest.mark.parametrize("channels", [20, BLOCK])
@FORMS
def test_a_convolution_in_the_product_before_it(bits, rows, beside, dtype, channels):
    """Rows move their slot on, go to another, or are the first; the norm before it is done on the way."""
    weight, full = made(BLOCK, 160, bits, dtype, beside)
    x, squares = torch.randn(rows, 160).to(DEVICE, dtype), torch.rand(5, rows, device=DEVICE) * 60
    taps, data = torch.randn(3, channels, device=DEVICE), torch.randn(8, 2, channels).to(DEVICE, dtype)
    of = Rows((1,) * rows, (3, 0, 4, 4, 1)[:rows])
    tails, others = (Slots(each, (2, 3, 4, 4, 6)[:rows], (2, 3, 5, 4, 1)[:rows]) for each in (data, data.clone()))
    projected = (Normed(x.float(), squares, 0.1).made() @ full.T).to(dtype)
    inputs, left = projected.split([channels, projected.shape[1] - channels], 1)
    want = ops.causal_conv(inputs, taps, of, stored=others, activation=F.silu).out, left
    with by_kernels(), poisoned_memory():
        ours = ops.projected_conv(Normed(x, squares, 0.1), weight, taps, of, stored=tails, activation=F.silu)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for mine, theirs in zip((*ours, tails.data), (*want, others.data), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@kernels
@pytest.mark.parametrize("rows", [2, 8])
def test_a_row_does_not_depend_on_those_beside_it(rows):
    weight, _ = made(40, 288, 4, LOW)
    x = inputs_of(rows + 1, 288, LOW)[:rows]
    with by_kernels():
        together = ops.linear(x, weight)
        x[1:] = torch.nan
        assert torch.equal(ops.linear(x, weight)[0], together[0])
