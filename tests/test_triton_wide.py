"""Products of some hundred rows: those in CUDA C++, on a Hopper and on the host, and rows to spare anywhere."""

import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from on_host import Host, needs_compiler
from test_triton import INSTALLED

from bough.ops.activation import gelu_tanh

pytestmark = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ROOM, PROCESSORS = 232_448, 132  # of a H200

if INSTALLED:
    from bough.ops.triton import product, wide
    from bough.ops.triton.native import able, compiled, kernel
    from bough.ops.triton.spare import BAD, GOOD, OUTPUTS, with_spare
    from bough.ops.triton.wide import _kernel, cut

on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def drawn(rows: int, inputs: int, outputs: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (torch.randn(n, inputs, device=device, dtype=torch.bfloat16) for n in (rows, 2 * outputs))
    return x, weight / inputs**0.5


def expect_gated(x: torch.Tensor, weight: torch.Tensor, activation) -> torch.Tensor:
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    with_spare(x, (len(x), len(weight) // 2)).fill_(torch.nan)  # which it will be given again
    out = wide(x, weight, activation)
    assert out is not None and out.shape == gate.shape
    assert error(out, activation(gate) * up) < 5e-3
    return out


@on_hopper
@pytest.mark.parametrize("activation", [F.silu, gelu_tanh, torch.sigmoid])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(320, 2560, 9216), (317, 2560, 9216), (289, 64, 9504), (257, 8, 8456), (256, 1000, 9216), (130, 136, 8456)],
)
def test_gates_and_what_they_gate(rows, inputs, outputs, activation):
    x, weight = drawn(rows, inputs, outputs)
    out = expect_gated(x, weight, activation)
    assert torch.equal(out, wide(x, weight, activation))


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "activation"),
    [(130, 72, 256, F.silu), (193, 136, 288, torch.sigmoid), (256, 8, 264, gelu_tanh), (317, 392, 280, F.silu)],
)
def test_gates_on_the_host(rows, inputs, outputs, activation, tmp_path):
    """In several orders of its threads; copies come at once, or as late as they may, and rows once it has waited."""
    host = Host(tmp_path)
    host.cluster = 2
    with host.stands_in(_kernel, processors=4, shared_bytes=lambda _: ROOM):
        for host.seed in range(4):
            host.late = host.seed % 2 > 0
            host.read = x, weight = drawn(rows, inputs, outputs, "cpu")
            host.awaited = x
            expect_gated(x, weight, activation)
    assert host.launches == 4


@on_hopper
def test_rows_that_lie_apart_and_launches_that_overlap():
    (x, weight), beside = drawn(320, 2560, 9216), torch.randn(320, 2688, device="cuda", dtype=torch.bfloat16)
    expected = wide(x, weight, F.silu)
    beside[:, 64:2624] = x
    assert torch.equal(wide(beside[:, 64:2624], weight, F.silu), expected)
    made, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    wide(made, weight, F.silu)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.mul(x, 1, out=made)  # which the product waits for, and not longer
        out = wide(made, weight, F.silu)
        made.zero_()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@on_hopper
def test_what_is_left_to_the_library():
    x, weight = drawn(320, 2560, 9216)
    assert able(x.device) and wide(x, weight, F.silu) is not None
    assert wide(x[:64], weight, F.silu) is None and wide(x.repeat(2, 1), weight, F.silu) is None  # few rows, and many
    assert wide(x.half(), weight.half(), F.silu) is None and wide(x, weight, F.relu) is None
    assert wide(x, weight[:4096], F.silu) is None and wide(x, weight[::2], F.silu) is None
    assert wide(x.T.contiguous().T, weight, F.silu) is None


def test_cuts():
    shape = cut(320, 18432, PROCESSORS, ROOM, "silu")
    assert shape is not None and shape[:3] == (5, 144, 3)
    assert shape.stages * shape.stage_bytes <= ROOM and shape.threads == 512
    assert cut(256, 18432, PROCESSORS, ROOM, "silu")[:3] == (4, 144, 4)
    for rows, products in ((128, 18432), (321, 18432), (320, 12352), (320, 22016), (320, 151936)):
        assert cut(rows, products, PROCESSORS, ROOM, "silu") is None
    assert cut(320, 18432, PROCESSORS, 101_376, "silu") is None  # there is no room for stages


@pytest.mark.skipif(shutil.which("nvcc") is None and not HOPPER, reason="needs CUDA's compiler")
@pytest.mark.parametrize("rows", [320, 256, 192])
def test_it_compiles_and_keeps_its_sums_in_registers(rows, tmp_path):
    shape = cut(rows, 18432, PROCESSORS, ROOM, "gelu_tanh")
    if shutil.which("nvcc") is None:
        assert compiled(shape.source)
        return
    (tmp_path / "wide.cu").write_text(shape.source)
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v", "-cubin"]
    command = ["nvcc", *target, "-o", tmp_path / "wide.cubin", tmp_path / "wide.cu"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert " 0 bytes spill stores" in told and " 0 bytes spill loads" in told, told


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_hopper)])
def test_rows_to_spare(device):
    like = torch.zeros(1, device=device)
    assert with_spare(like, (288, 4)).shape == (288, 4) and with_spare(like, (320, 4, 2)).shape == (320, 4, 2)
    assert with_spare(like, (320, 4)).untyped_storage().nbytes() == GOOD * 16
    assert with_spare(like, (GOOD, 4)).untyped_storage().nbytes() == GOOD * 16
    weight, bias = torch.randn(6, 4, device=device), torch.randn(6, device=device)
    for rows in (1, BAD.start, 320, BAD.stop - 1, BAD.stop):
        x = with_spare(like, (rows, 4)).normal_()
        x.as_strided((x.untyped_storage().nbytes() // 16, 4), (4, 1))[rows:] = torch.nan  # nobody looks there
        made = product(x, weight, bias)
        assert made.shape == (rows, 6)
        torch.testing.assert_close(made, F.linear(x, weight, bias))
        assert (made.untyped_storage().nbytes() == GOOD * 24) == (rows in BAD or rows == GOOD)
    exact = torch.randn(320, 4, device=device)  # with none to spare
    torch.testing.assert_close(product(exact, weight, None), F.linear(exact, weight))
    last = torch.randn(328, 4, device=device)[8:]
    torch.testing.assert_close(product(last, weight, None), F.linear(last, weight))
    strided = torch.randn(328, 8, device=device)[:320, :4]
    torch.testing.assert_close(product(strided, weight, None), F.linear(strided, weight))
    assert len(product(with_spare(like, (320, 1)).normal_(), torch.zeros(OUTPUTS + 1, 1, device=device), None)) == 320


def test_a_kernel_that_cannot_be_made_is_done_without(monkeypatch, caplog):
    def made(*given):
        raise RuntimeError("it could not be compiled: no")

    monkeypatch.setattr("bough.ops.triton.native.Kernel", made)
    assert kernel("wide", "", 0, torch.device("cpu")) is None
    assert "a kernel (wide) is not used, and steps take longer: it could not be compiled: no" in caplog.text
