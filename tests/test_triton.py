"""Each Triton kernel against its reference twin, on odd shapes, with all that it must not touch poisoned.

On a machine with CUDA the tests run there. Elsewhere they run in Triton's interpreter, which is chosen when triton is
first imported: so in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import interpreted
import pytest
import torch
import warp
from test_delta import Case, close, slow
from torch import Tensor

from bough import ops
from bough.ops import Rows, Slots
from bough.ops.ragged import Recording
from bough.ops.twins import twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None
HERE = INSTALLED and (DEVICE == "cuda" or INTERPRETED)
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # numpy, and so the interpreter, has no bfloat16

if HERE:
    from bough.ops import triton as twin

kernels = pytest.mark.skipif(not HERE, reason="triton needs CUDA, or a process of its own for its interpreter")
SHORT = Rows((1, 3, 0, 8), (1, 0, 2, 5))
PARTS = ("attention", "chunks", "experts", "heads", "linear", "norm", "owed", "prefill", "rounds", "units")
FILES = ("fixed", "journal", "rounds", "quant_kernels", "triton", *(f"triton_{of}" for of in PARTS))
LONG = Rows((70, 9, 2, 0, 40), (3, 0, 1, 1, 1), ((5, 6, 70), (), (1,), (), (32,)))


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.skipif(HERE, reason="the tests run in this process")
@pytest.mark.parametrize("names", [FILES[:1], FILES[1:2], FILES[2:4], FILES[4:9], FILES[9:]], ids=" ".join)
def test_kernels_in_the_interpreter(names):
    """Several files in a process, since each takes seconds to start."""
    files = [Path(__file__).with_name(f"test_{each}.py") for each in names]
    options = ["-q", "-rfEp", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    passed = all(f"PASSED tests/{each.name}::" in ran.stdout for each in files)
    assert ran.returncode == 0 and passed, ran.stdout + ran.stderr


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_what_kernels_are_held_against_is_not_computed_by_them():
    on_gpu = {dtype: SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in (torch.float32, torch.float64)}
    assert twins(on_gpu[torch.float32]) is not None
    assert twins(on_gpu[torch.float64]) is None


@pytest.fixture(autouse=True, scope="module")
def plain_numbers():
    """Triton 3.6's interpreter turns arrays of one number into indices in a way that numpy has given up.

    And small products of a warp take it a long time, as does all that it does more than once.
    """
    if not INTERPRETED:
        yield
        return
    from triton.language import tensor

    with interpreted.faster(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "__index__", lambda self: self.handle.data.item())
        for name, faster in warp.FASTER.items():
            patch.setattr(f"bough.ops.triton.seen.{name}", faster)
        yield


def on_device(case: Case, dtype: torch.dtype = torch.float32) -> Case:
    floats = (each.to(DEVICE, dtype) for each in (case.q, case.k, case.v))
    return Case(case.rows, *floats, *(each.to(DEVICE) for each in (case.g, case.beta, case.state)))


def pool(entries: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A part of entries that are larger than it, as a layer's part of a slot or a page is."""
    size = torch.Size(shape).numel()
    return torch.randn(entries, size + 24).to(DEVICE, dtype)[:, 8 : 8 + size].view(entries, *shape)


def check(case: Case, ours, tolerance: float) -> None:
    out, states = slow(case)
    close(ours.out.cpu(), out.cpu(), tolerance)
    for row, count in enumerate(case.rows.counts):
        close(ours.state[row].cpu(), states[row][count].cpu(), tolerance)
        for cut, state in zip(case.rows.cuts_of(row), ours.cuts[row], strict=True):
            close(state.cpu(), states[row][cut].cpu(), tolerance)


@kernels
@pytest.mark.parametrize(
    ("rows", "decay", "alike"),
    [
        *((SHORT, decay, alike) for decay, alike in (("usual", 0.0), ("strong", 0.5), ("now and then strong", 1.0))),
        *((LONG, decay, alike) for decay, alike in (("none", 1.0), ("strong", 0.5), ("now and then strong", 1.0))),
    ],
)
def test_delta_equals_the_slow_loop(rows, decay, alike):
    case = on_device(Case.of(rows, decay=decay, alike=alike, k_dim=24, v_dim=20))
    check(case, twin.gated_delta(*case.inputs, rows, explicit=case.state), 2e-5)


@kernels
def test_delta_of_rounded_inputs_errs_as_little_as_its_reference():
    """The output's own rounding is most of the error; the state has 11 bits, where the reference has 24."""
    case = on_device(Case.of(Rows((150, 4), (1, 1)), k_dim=32, v_dim=16, alike=0.3), LOW)
    out, states = slow(case)

    def error(of: Tensor, expected: Tensor) -> float:
        return float((of.double() - expected).norm() / expected.norm())

    ours, reference = (op(*case.inputs, case.rows, explicit=case.state) for op in (twin.gated_delta, ops.gated_delta))
    assert error(ours.out, out) < 1.1 * error(reference.out, out) + (1e-3 if INTERPRETED else 2e-4)
    for row, count in enumerate(case.rows.counts):
        assert error(ours.state[row], states[row][count]) < 1e-3


@kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="too slow in the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(("k_heads", "rows"), [(1, LONG), (16, LONG), (1, SHORT)])
def test_delta_of_real_width(dtype, k_heads, rows):
    case = on_device(Case.of(rows, k_heads=k_heads, k_dim=128, v_dim=128), dtype)
    check(case, twin.gated_delta(*case.inputs, rows, explicit=case.state), 2e-5 if dtype == torch.float32 else 2e-2)


@kernels
@pytest.mark.parametrize("rows", [SHORT, LONG])
def test_delta_in_slots_touches_no_others(rows):
    case = on_device(Case.of(rows, k_dim=16, v_dim=16))
    data, count = pool(20, 4, 16, 16), len(rows.counts)
    read, write = tuple(range(1, 1 + count)), (1, *range(8, 7 + count))  # the first row in place
    cut = tuple(tuple(range(14 + 2 * row, 14 + 2 * row + len(rows.cuts_of(row)))) for row in range(count))
    cut = (cut[0], (), (18,), (), (19,)) if rows.cuts else ()
    expected = data.clone()
    want = ops.gated_delta(*case.inputs, rows, stored=Slots(expected, read, write, cut))
    ours = twin.gated_delta(*case.inputs, rows, stored=Slots(data, read, write, cut))
    close(ours.out, want.out)
    close(data, expected)


@kernels
def test_recorded_rows_write_no_state():
    rows = Rows((2, 5, 11), (1, 1, 1))
    case = on_device(Case.of(rows))
    data, indices = pool(4, 4, 8, 6), ((1, 2, 3), (0, 0, 0))
    before, ours, theirs = data.clone(), Recording(), Recording()
    recorded = {"recorded": (True, False, True)}
    out = twin.gated_delta(*case.inputs, rows, stored=Slots(data, *indices, **recorded, recording=ours)).out
    want = ops.gated_delta(*case.inputs, rows, stored=Slots(data.clone(), *indices, **recorded, recording=theirs)).out
    close(out, want)
    assert torch.equal(data[1:], before[1:]) and ours.tokens == 13
    for mine, other in zip(ours.inputs, theirs.inputs, strict=True):
        close(mine, other)


@kernels
@pytest.mark.parametrize("rows", [SHORT, LONG])
def test_carry(rows):
    x, data, count = torch.randn(rows.total, 11).to(DEVICE), pool(20, 2, 11), len(rows.counts)
    read, write = tuple(range(1, 1 + count)), (1, *range(8, 7 + count))
    cut = ((14, 15, 16), (), (18,), (), (19,)) if rows.cuts else ()
    expected = data.cpu()
    ops.carry(x.cpu(), rows, stored=Slots(expected, read, write, cut))
    twin.carry(x, rows, stored=Slots(data, read, write, cut))
    assert torch.equal(data.cpu(), expected)


@kernels
def test_gates():
    both = torch.randn(37, 12).to(DEVICE)
    a, b = both[:, 1:6] * 20, both[:, 7:]
    rate, dt_bias = -torch.rand(5), torch.randn(5)
    ours = twin.delta_gates(a, b, rate.to(DEVICE), dt_bias.to(DEVICE))
    for mine, other in zip(ours, ops.delta_gates(a.cpu(), b.cpu(), rate, dt_bias), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=2e-6, atol=1e-30)


@kernels
@pytest.mark.parametrize(
    "rows",
    [
        SHORT,
        Rows((70, 9, 2, 0, 40), (3, 0, 1, 1, 1), ((1, 2, 70), (), (1,), (), (32,))),
        Rows((130, 3, 12), (0, 1, 1), ((64, 66), (1, 2, 3), (8,))),
    ],
)
@pytest.mark.parametrize(
    ("kernel", "silu", "dtype"), [(4, True, torch.float32), (3, False, torch.float32), (2, True, LOW)]
)
def test_conv(rows, kernel, silu, dtype):
    """The inputs are a part of a projection, with NaN around them."""
    wide, channels = torch.full((rows.total + 2, 150), torch.nan).to(DEVICE, dtype), 139
    x = wide[1:-1, 8 : 8 + channels]
    x.copy_(torch.randn(x.shape))
    taps, bias = torch.randn(kernel, channels).to(DEVICE), None if silu else torch.randn(channels).to(DEVICE)
    data, count = pool(20, kernel - 1, channels, dtype=dtype), len(rows.counts)
    read, write = tuple(range(1, 1 + count)), (1, *range(8, 7 + count))
    slots = iter(range(14, 20))
    cut = tuple(tuple(next(slots) for _ in rows.cuts_of(row)) for row in range(count))
    expected, activation = data.clone(), torch.nn.functional.silu if silu else None
    want = ops.causal_conv(x, taps, rows, bias=bias, stored=Slots(expected, read, write, cut), activation=activation)
    ours = twin.causal_conv(x, taps, rows, bias=bias, stored=Slots(data, read, write, cut), silu=silu)
    close(ours.out, want.out, 2e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(data, expected)


@kernels
@pytest.mark.parametrize("rows", [Rows((2, 1, 5), (1, 0, 3)), Rows((2, 1, 15), (1, 0, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_a_whole_delta_layer(rows, dtype):
    k_heads, heads, dk, dv = 2, 4, 16, 8
    keys = k_heads * dk
    channels = 2 * keys + heads * dv
    qkv, z, b, a = (torch.randn(rows.total, width).to(DEVICE, dtype) for width in (channels, heads * dv, heads, heads))
    rate, dt_bias, norm = (torch.randn(shape).to(DEVICE) for shape in (heads, heads, dv))
    layer = ops.DeltaLayer(-rate.abs(), dt_bias, norm.to(dtype), 1e-6)
    states, indices = pool(6, heads, dk, dv), ((1, 0, 3), (4, 5, 3))
    old_states = Slots(states.clone(), *indices)
    ours = twin.gated_delta_layer(qkv, z, b, a, layer, k_heads, rows, Slots(states, *indices))
    q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
    g, beta = ops.delta_gates(a, b, layer.rate, layer.dt_bias)
    out = ops.gated_delta(
        q.view(-1, k_heads, dk), k.view(-1, k_heads, dk), v.view(-1, heads, dv), g, beta, rows, stored=old_states
    ).out
    want = ops.rms_norm_gated(out, z.view(out.shape), layer.norm, layer.eps)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2  # of low precision, a rounding or two
    close(ours, want, tolerance)
    close(states, old_states.data, 2e-5 if dtype == torch.float32 else 5e-3)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("width", [1, 300, 40_000])
def test_largest_of_each_row(width, dtype):
    x = torch.randn(7, width + 5).to(dtype)[:, 3:-2]
    x[1] = x[1].round()  # some are equal
    x[2], x[3] = -torch.inf, torch.inf
    x[4, -1], x[5, 0] = torch.nan, 1e4
    best, at = twin.largest(x.to(DEVICE))
    wanted = [0, 1, 5, 6]
    expected, first = x[wanted].float().numpy().max(1), x[wanted].float().numpy().argmax(1)
    assert best[wanted].tolist() == expected.tolist() and at[wanted].tolist() == first.tolist()
    assert not best[2:5].isfinite().any() and not len(twin.largest(x[:0].to(DEVICE))[0])
    if width > 1:
        assert x[4].isnan().sum() == 1


@kernels
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_embedding(tokens):
    table = torch.randn(50, 5000).to(DEVICE, LOW)[:, 8:-1]
    which = torch.randint(50, (tokens + 1, 2), dtype=torch.int32, device=DEVICE)[1:, 1]  # nowhere in particular
    for each in (table, table.T.contiguous().T):
        assert torch.equal(twin.embedding(which, each), table[which.long()])
