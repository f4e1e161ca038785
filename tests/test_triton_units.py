"""Products on the matrix units, against those of torch; and what stands for them in the interpreter."""

import pytest
import torch
import warp
from test_triton import DEVICE, HERE, INTERPRETED, kernels

pytestmark = kernels
if HERE:
    import triton
    import triton.language as tl

    from bough.ops.triton.codes import has_ptx
    from bough.ops.triton.units import LANES, add_product, beside, four, parts

    @triton.jit
    def _products(a, b, to, out, again, ptx: tl.constexpr):
        """out = to + a · b, of all bits; and the same sum as a left factor, times b."""
        lane = tl.arange(0, LANES)
        m, n = lane // 4, lane % 4
        a += m * 8 + n
        h0, l0 = parts(tl.load(a))
        h1, l1 = parts(tl.load(a + 64))
        h2, l2 = parts(tl.load(a + 4))
        h3, l3 = parts(tl.load(a + 68))
        b0, b1 = tl.load(b + n * 8 + m), tl.load(b + n * 8 + 32 + m)
        at = m * 8 + 2 * n
        total = (tl.load(to + at), tl.load(to + at + 1), tl.load(to + at + 64), tl.load(to + at + 65))
        total = add_product(total, (h0, h1, h2, h3), (b0, b1), ptx)
        total = add_product(total, (l0, l1, l2, l3), (b0, b1), ptx)
        for entry in tl.static_range(4):
            tl.store(out + at + entry % 2 + entry // 2 * 64, total[entry])
        zero = tl.zeros((LANES,), tl.float32)
        even, odd = tl.load(b + 2 * n * 8 + m), tl.load(b + (2 * n + 1) * 8 + m)  # columns 0 2 4 6 1 3 5 7
        total = add_product((zero, zero, zero, zero), (total[0], total[2], total[1], total[3]), (even, odd), ptx)
        for entry in tl.static_range(4):
            tl.store(again + at + entry % 2 + entry // 2 * 64, total[entry])

    @triton.jit
    def _columns(x, out):
        at = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
        first, second, third, fourth = four(tl.load(x + at))
        tl.store(out + at, beside(first + 1, second + 2, third + 3, fourth + 4))


def made() -> tuple[torch.Tensor, ...]:
    """Factors on the right are of few bits, as keys are."""
    a, to = torch.randn(16, 8), torch.randn(16, 8)
    return a.to(DEVICE), torch.randn(8, 8).half().float().to(DEVICE), to.to(DEVICE)


@pytest.fixture(params=[False, True], ids=["units", "stand-in"], autouse=True)
def stand_in(request, monkeypatch) -> None:
    """What is tested; or what stands for it, where there is an interpreter that needs it."""
    if request.param and not INTERPRETED:
        pytest.skip("nothing stands for what the device does")
    for name, faster in warp.FASTER.items() if request.param else ():
        monkeypatch.setattr(f"{__name__}.{name}", faster)


def test_products():
    a, b, to = made()
    out, again = (torch.full((16, 8), torch.nan, device=DEVICE) for _ in range(2))
    _products[1,](a, b, to, out, again, ptx=has_ptx(a.device), num_warps=1)
    want = to.double() + a.double() @ b.double()
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(again.double(), want @ b.double(), rtol=1e-2, atol=1e-2)  # a factor of 11 bits


def test_columns():
    x, out = torch.randn(32, 4, device=DEVICE), torch.full((32, 4), torch.nan, device=DEVICE)
    _columns[1,](x, out, num_warps=1)
    torch.testing.assert_close(out, x + torch.arange(1.0, 5, device=DEVICE))
