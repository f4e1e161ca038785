"""The Triton kernels for products of few rows against their reference twin, on odd shapes, with all that they must not
read poisoned. Where there is no GPU they run in the interpreter, as those of test_triton.py.
"""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from test_fixed import by_kernels
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers
from test_triton_experts import poisoned_memory

from bough import ops
from bough.ops.deferred import Normed, Product
from bough.ops.ragged import Rows, Slots

__all__ = ["plain_numbers"]  # a fixture that all tests here use

twin = import_module("bough.ops.triton.linear") if HERE else None
arrivals = import_module("bough.ops.triton.arrivals").arrivals if HERE else None


def made(rows: int, outputs: int, inputs: int, dtype: torch.dtype):
    """x is a part of wider rows, the last of which is NaN as the padding of a step may be."""
    x, weight = torch.randn(rows, inputs + 8, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
    x, weight, bias = x.to(dtype), (weight * inputs**-0.5).to(dtype), torch.randn(outputs, device=DEVICE).to(dtype)
    if rows > 1:
        x[-1] = torch.nan
    return x[:, 8:], weight, bias


def exactly(x, weight, bias=None):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def near(ours, theirs, exact):
    """As near the exact one as theirs, but for the row that is padding."""
    kept = slice(0, max(1, len(ours) - 1))
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    scale = exact[kept].abs().max()
    error, other = ((each.double() - exact)[kept].abs().max() / scale for each in (ours, theirs))
    lucky = torch.finfo(ours.dtype).eps / 8  # theirs may be, where there are few outputs
    assert error <= (1e-6 if ours.dtype == torch.float32 else 1.5 * other + lucky)


VECTOR = ("vector", (4, 32, 1, 1)), ("vector", (8, 16, 2, 3))
PRODUCTS = ("product", (16, 32, 4, 1)), ("product", (32, 16, 2, 3, 3)), ("product", (32, 16, 4, 3, 2))
SHAPES = [
    (1, 70, 96, VECTOR),
    (1, 33, 40, VECTOR),
    (1, 33, 40, PRODUCTS),
    (17, 64, 128, PRODUCTS),
    (3, 2, 8, PRODUCTS),
    (61, 36, 72, PRODUCTS[1:2]),
]
CASES = [(how, cut, *shape) for *shape, some in SHAPES for how, cut in some]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("how", "cut", "rows", "outputs", "inputs"), CASES)
def test_product(how, cut, rows, outputs, inputs, biased, dtype):
    x, weight, bias = made(rows, outputs, inputs, dtype)
    bias = bias if biased else None
    with poisoned_memory():
        ours = getattr(twin, how)(x, twin.Work(weight, twin.Rest(bias)), twin.Cut(*cut)).out
    near(ours, F.linear(x, weight, bias), exactly(x, weight, bias))


@kernels
@pytest.mark.parametrize("activation", [F.silu, ops.gelu_tanh])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(("how", "cut", "rows", "outputs", "inputs"), [each for each in CASES if each[3] % 2 == 0])
def test_gated_product(how, cut, rows, outputs, inputs, dtype, activation):
    x, weight, _ = made(rows, outputs, inputs, dtype)
    with poisoned_memory():
        work = twin.Work(weight, activation=twin.ACTIVATIONS[activation])
        ours = getattr(twin, how)(x, work, twin.Cut(*cut)).out
    theirs = ops.gated(*ops.linear(x, weight).chunk(2, -1), activation)
    gate, up = exactly(x, weight).chunk(2, -1)
    near(ours, theirs, activation(gate) * up)


def normed_exactly(x, weight, onto, scale, eps):
    """The sum, and its norm."""
    total = exactly(x, weight) + onto.double()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return total, normed if scale is None else normed * scale.double()


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("how", "cut", "rows", "outputs", "inputs"), CASES)
def test_half_a_norm_in_the_product_before_it(how, cut, rows, outputs, inputs, scaled, dtype):
    x, weight, _ = made(rows, outputs, inputs, dtype)
    onto = torch.randn(rows, outputs + 8, device=DEVICE).to(dtype)[:, 8:]
    scale = torch.randn(outputs, device=DEVICE) + 1 if scaled else None
    with poisoned_memory():
        out, total, squares = getattr(twin, how)(
            x, twin.Work(weight, twin.Rest(onto=onto, scale=scale)), twin.Cut(*cut)
        )
    sums, exact = normed_exactly(x, weight, onto, scale, 1e-6)
    theirs = ops.Norm(scale, 1e-6, rounded=False).whole(onto, F.linear(x, weight))
    near(total, theirs[0], sums)
    near(Normed(out, squares, 1e-6).made(), theirs[1], exact)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("activation", [None, F.silu])
@pytest.mark.parametrize(("how", "cut", "rows", "outputs", "inputs"), [each for each in CASES if each[3] % 2 == 0])
def test_half_a_norm_in_the_product_after_it(how, cut, rows, outputs, inputs, activation, dtype):
    x, weight, bias = made(rows, outputs, inputs, dtype)
    parts = torch.randn(rows, inputs, device=DEVICE).square().unflatten(1, (-1, 4)).sum(-1).T.contiguous()
    normed = Normed(x, parts, 0.1)
    root = torch.rsqrt(parts.double().sum(0) / inputs + 0.1)[:, None]
    bias = None if activation else bias
    named = twin.ACTIVATIONS[activation] if activation else None
    with poisoned_memory():
        ours = getattr(twin, how)(normed, twin.Work(weight, twin.Rest(bias), named), twin.Cut(*cut)).out
    theirs, exact = F.linear(normed.made(), weight, bias), exactly(x.double() * root, weight, bias)
    if activation:
        theirs, exact = (activation(each.chunk(2, -1)[0]) * each.chunk(2, -1)[1] for each in (theirs, exact))
    near(ours, theirs, exact)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("channels", [24, 38, 40])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_a_convolution_in_the_product_before_it(count, channels, dtype, monkeypatch):
    """Rows move their slot on, go to another, or are the first."""
    x, weight, _ = made(count, 40, 96, dtype)
    taps, data = torch.randn(3, channels, device=DEVICE), torch.randn(48, 2, channels, device=DEVICE).to(dtype)
    x[-1] = 1.0
    more = tuple(range(8, 48))
    rows = Rows((1,) * count, (3, 0, 4, 4, 1, *more)[:count])
    read, write = ((*some, *more)[:count] for some in ((2, 3, 4, 4, 6), (2, 3, 5, 4, 1)))
    tails, others = (Slots(each, read, write) for each in (data, data.clone()))
    monkeypatch.setattr(import_module("bough.ops.triton"), "few", lambda x, weight: True)  # in any dtype
    want = ops.projected_conv(x, weight, taps, rows, stored=others, activation=F.silu)
    with by_kernels(), poisoned_memory():
        ours = ops.projected_conv(x, weight, taps, rows, stored=tails, activation=F.silu)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, theirs in zip((*ours, tails.data), (*want, others.data), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@kernels
@pytest.mark.parametrize("rows", [1, 5, 61])
def test_a_norm_between_products_is_left_to_them(rows, monkeypatch):
    """What ops make of it where twins are, and where they are not."""
    x, weight, _ = made(rows, 40, 96, LOW)
    onto, after = torch.randn(rows, 40, device=DEVICE).to(LOW), torch.randn(64, 40, device=DEVICE).to(LOW)
    norm = ops.Norm(torch.randn(40, device=DEVICE), 1e-6, rounded=False)
    total, normed = norm.after(onto, F.linear(x, weight))
    theirs = [total, F.linear(normed, after), ops.gated(*F.linear(normed, after).chunk(2, -1), F.silu)]
    monkeypatch.setattr(import_module("bough.ops.triton"), "few", lambda x, weight: True)  # in any dtype
    with by_kernels(), poisoned_memory():
        assert isinstance(ops.later(x, weight), torch.Tensor if torch.float16 == LOW else Product)
        left = Product(x, weight)
        alone = ops.made(left)
        total, normed = norm.after(onto, left)
        ours, gated = ops.linear(normed, after), ops.gated_linear(normed, after, None, F.silu)
    assert isinstance(normed, Normed)
    near(alone, F.linear(x, weight), exactly(x, weight))
    sums, exact = normed_exactly(x, weight, onto, norm.weight, 1e-6)
    near(total, theirs[0], sums)
    near(ours, theirs[1], exactly(exact, after))
    gate, up = exactly(exact, after).chunk(2, -1)
    near(gated, theirs[2], F.silu(gate) * up)


@kernels
@pytest.mark.parametrize("rows", [1, 5, 61])
def test_the_cut_that_is_chosen(rows):
    x, weight, bias = made(rows, 40, 1288, LOW)
    with poisoned_memory():
        ours, gated = twin.few_rows(x, weight, bias), twin.gated_rows(x, weight, F.silu)
    near(ours, F.linear(x, weight, bias), exactly(x, weight, bias))
    gate, up = exactly(x, weight).chunk(2, -1)
    near(gated, ops.gated(*F.linear(x, weight).chunk(2, -1), F.silu), F.silu(gate) * up)
    assert arrivals(x.device).count_nonzero() == 0


@kernels
def test_what_the_kernels_leave_to_torch():
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((4, 16), (8, 16)))
    assert twin.few(x, weight) and twin.few(x[:1], weight) and twin.few(x[:, :8], weight[:, :8].contiguous())
    other = [
        (x.float(), weight.float()),
        (x, weight.float()),
        (x[:0], weight),
        (x[:1].expand(twin.ROWS + 1, 16), weight),
    ]
    other += [(x[:, 1:13], weight[:, 1:13]), (x[:, :12], weight[:, :12].contiguous()), (x, weight[:, :1].expand(8, 16))]
    other += [(x.T.contiguous().T, weight), (x, weight.new_empty(1, 16).expand(twin.OUTPUTS + 1, 16))]
    assert not any(twin.few(*each) for each in other)


@kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need CUDA")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_captured_graph_repeats_what_was_computed(rows):
    x, weight, bias = made(rows, 2560, 4096, LOW)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # which has counters of its own, made before
        want = [ops.linear(x, weight, bias), F.linear(x, weight, bias)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        ours = ops.linear(x, weight, bias)
    for _ in range(3):
        ours.fill_(torch.nan)
        graph.replay()
        assert torch.equal(ours[:-1], want[0][:-1])
    assert (ours - want[1])[: max(1, rows - 1)].abs().max() < 3e-2
