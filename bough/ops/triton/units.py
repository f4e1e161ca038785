# mypy: allow-untyped-defs, allow-incomplete-defs
"""Small products on the matrix units, of numbers that lie in the registers of one warp just where these take them.

`tl.dot` puts its factors through shared memory. Here everything is a tensor [32] whose number i belongs to thread i,
and a matrix is a tuple of these. With m = i // 4 and n = i % 4, thread i has of
    a factor  [16, 8]  (m, n), (m + 8, n), (m, n + 4), (m + 8, n + 4)
    a factor   [8, 8]  (n, m), (n + 4, m)
    a sum     [16, 8]  (m, 2n), (m, 2n + 1), (m + 8, 2n), (m + 8, 2n + 1)
So a sum is a left factor for whoever takes its columns in the order 0 2 4 6 1 3 5 7, and nothing moves.

Factors are of 11 bits. What has more is cut into two numbers (`parts`), each with a product of its own.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(32)
PRODUCT = tl.constexpr(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
OPERANDS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
TAKEN = tl.constexpr(-8192)  # the bits of a float32 that a factor has


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _taken(x):
    return (_bits(x) & TAKEN).to(tl.float32, bitcast=True)


@triton.jit
def parts(x):
    """What a factor can have of float32, and the rest, of which it has all but the last two bits."""
    high = _taken(x)
    return high, x - high


@triton.jit
def four(x):
    """The columns of a tensor [32, 4]."""
    even, odd = tl.split(tl.reshape(x, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def beside(first, second, third, fourth):
    """The tensor [32, 4] of four columns."""
    even, odd = tl.join(first, third), tl.join(second, fourth)
    return tl.reshape(tl.join(even, odd), [LANES, 4])


@triton.jit
def add_product(to, left, right, ptx: tl.constexpr):
    """A sum with the product of two factors added to it."""
    t0, t1, t2, t3 = to
    l0, l1, l2, l3 = left
    r0, r1 = right
    if ptx:
        return tl.inline_asm_elementwise(
            PRODUCT, OPERANDS, [_bits(l0), _bits(l1), _bits(l2), _bits(l3), _bits(r0), _bits(r1), t0, t1, t2, t3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    of_left = tl.join(tl.join(_taken(l0), _taken(l1)), tl.join(_taken(l2), _taken(l3)))  # [32, half, late]
    of_left = tl.reshape(tl.permute(tl.reshape(of_left, [8, 4, 2, 2]), [2, 0, 3, 1]), [16, 8])
    of_right = tl.reshape(tl.join(_taken(r0), _taken(r1)), [8, 4, 2])
    of_right = tl.reshape(tl.permute(of_right, [2, 1, 0]), [8, 8])
    made = tl.sum(of_left[:, :, None] * of_right[None, :, :], 1)
    made = tl.permute(tl.reshape(made, [2, 8, 4, 2]), [1, 2, 0, 3])
    even, odd = tl.split(tl.reshape(made, [LANES, 2, 2]))
    m0, m2 = tl.split(even)
    m1, m3 = tl.split(odd)
    return t0 + m0, t1 + m1, t2 + m2, t3 + m3
