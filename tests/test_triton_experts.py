"""The Triton kernels for experts against their reference twin, on odd shapes, with all that they must not read
poisoned. Where there is no GPU they run in the interpreter, as those of test_triton.py.
"""

from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers

from bough import ops

__all__ = ["plain_numbers"]  # a fixture that all tests here use

twin = import_module("bough.ops.triton.experts") if HERE else None


@contextmanager
def poisoned_memory():
    """Memory that is handed out holds NaN, or the greatest number."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def chosen_of(tokens: int, chosen: int, count: int):
    return torch.rand(tokens, count).topk(chosen).indices.to(DEVICE)


@kernels
@pytest.mark.parametrize("few", [0, 1024])
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "size"), [(1, 3, 8, 16), (70, 2, 3, 16), (33, 4, 40, 4), (5, 1, 2, 1), (9, 7, 7, 2)]
)
def test_blocks_hold_every_pair_once(monkeypatch, few, tokens, chosen, count, size):
    monkeypatch.setattr(twin, "FEW", few)
    expert = chosen_of(tokens, chosen, count).flatten()
    with poisoned_memory():
        order, blocks = twin.schedule(expert, count, size)
    assert torch.equal(order.long(), expert.sort(stable=True).indices)
    seen = []
    for whose, start, length in blocks.tolist():
        assert 0 <= whose < count and 0 <= length <= size
        block = order[start : start + length]
        assert len(block) == length and (expert[block.long()] == whose).all()
        seen += block.tolist()
    assert sorted(seen) == list(range(tokens * chosen))
    assert (blocks[:, 2] > 0).sum() == sum(-(-int(some) // size) for some in expert.bincount())


@kernels
@pytest.mark.parametrize("activation", [F.silu, ops.gelu_tanh])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("few", [0, 1024])  # sorted as many pairs are, and as few
@pytest.mark.parametrize(
    ("tokens", "chosen", "count", "hidden", "width"),
    [(1, 3, 9, 40, 24), (30, 2, 5, 144, 33), (38, 2, 12, 64, 80), (70, 2, 2, 32, 16)],  # each has tiles of its own
)
def test_experts(monkeypatch, activation, dtype, few, tokens, chosen, count, hidden, width):
    monkeypatch.setattr(twin, "FEW", few)
    expert = chosen_of(tokens, chosen, count)
    x, gate_up, down = (
        torch.randn(shape, device=DEVICE)
        for shape in ((tokens, hidden + 8), (count, 2 * width, hidden), (count, hidden, width))
    )
    x, gate_up, down = (each.to(dtype) for each in (x[:, 8:], gate_up * hidden**-0.5, down * width**-0.5))
    share = torch.rand(tokens, chosen, device=DEVICE)
    if activation is F.silu:
        share = share.to(dtype)  # else, in float32 whatever x is
    if tokens > 1:
        x[-1] = torch.nan  # as the padding of a step may be
    for idle in set(range(count)) - set(expert.flatten().tolist()):
        gate_up[idle] = down[idle] = torch.nan
    with poisoned_memory():
        ours = twin.experts(x, share, expert, gate_up, down, activation)
    assert ours.shape == x.shape and ours.dtype == dtype
    kept = slice(0, max(1, tokens - 1))
    loop = ops.experts(x, share, expert, list(gate_up), list(down), activation)
    exact = ops.experts(x.double(), share.double(), expert, list(gate_up.double()), list(down.double()), activation)
    scale = exact[kept].abs().max()
    error, theirs = ((each.double() - exact)[kept].abs().max() / scale for each in (ours, loop))
    assert error <= (1e-6 if dtype == torch.float32 else 1.5 * theirs + 1e-4)
    assert (ours - loop)[kept].abs().max() <= (2e-6 if dtype == torch.float32 else 2e-2) * scale
    alone = twin.experts(x[:1], share[:1], expert[:1], gate_up, down, activation)
    assert (alone - ours[:1]).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-2) * scale


@kernels
def test_no_tokens():
    x = torch.empty(0, 32, device=DEVICE)
    share, expert = x.new_empty(0, 2), torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert twin.experts(x, share, expert, x.new_empty(4, 32, 32), x.new_empty(4, 32, 16), F.silu).shape == (0, 32)


@kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need CUDA")
@pytest.mark.parametrize("tokens", [3, 600])
def test_a_captured_graph_follows_new_choices(tokens):
    x, gate_up, down = (torch.randn(shape, device=DEVICE) for shape in ((tokens, 64), (9, 64, 64), (9, 64, 32)))
    share, expert = torch.rand(tokens, 2, device=DEVICE), chosen_of(tokens, 2, 9)
    inputs = (x, share, expert, ops.matrices(list(gate_up)), ops.matrices(down), F.silu)
    ops.experts(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = ops.experts(*inputs)
    for _ in range(2):
        expert.copy_(chosen_of(tokens, 2, 9))
        graph.replay()
        want = ops.experts(x, share, expert, list(gate_up), list(down), F.silu)
        assert (ours - want).abs().max() <= 1e-4 * want.abs().max()
