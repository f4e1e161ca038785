# mypy: allow-untyped-defs, allow-incomplete-defs
"""Codes of 8 and 4 bits as numbers.

They become numbers two at a time, as halves of a word: below the exponent of 2**n, where the last bit of a number is
worth one, four bits are that number and the code. What has been added is known, and taken off again.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Form(NamedTuple):
    """How numbers of 16 bits have a code of four in their last."""

    kind: str
    one: int
    low: int  # the power of two whose last bit is worth one
    high: int  # 16 times that, whose last bit is worth 16
    value: int  # of low

    def added(self, bits: int) -> int:
        """What the numbers of a code have beyond it: one number, or those of both halves of a code of eight bits."""
        return self.value + 8 if bits == 4 else 17 * self.value + 128

    def less(self, bits: int) -> int:
        """The same as a number of this kind, negative."""
        return 0x8000 | (self.low | 8 if bits == 4 else self.high | (self.value + 128) // 16)


FORMS = {
    tl.bfloat16: Form("bf16x2", 0x3F80, 0x4300, 0x4500, 128),
    tl.float16: Form("f16x2", 0x3C00, 0x6400, 0x7400, 1024),
}


@triton.constexpr_function
def _base(dtype, is_high):
    return FORMS[dtype].high if is_high else FORMS[dtype].low


@triton.constexpr_function
def added(dtype, bits):
    return FORMS[dtype].added(bits)


@triton.constexpr_function
def _masked(to, base, shift):
    """Instructions that leave four bits of each half of $1 in `to`, as numbers."""
    return f"shr.u32 {to}, $1, {shift}; lop3.b32 {to}, {to}, 0x000F000F, {base * 0x10001:#x}, 0xEA;"


@triton.constexpr_function
def _in_full(dtype, bits, place):
    """Instructions that make weights of the codes at one place of two halves, exactly until they are rounded."""
    form = FORMS[dtype]
    fma, constants = f"fma.rn.{form.kind}", (("one", form.one), ("less", form.less(bits)))
    known = ".reg .b32 low, high, one, less;" + "".join(f"mov.b32 {name}, {of * 0x10001:#x};" for name, of in constants)
    low = _masked("low", form.low, bits * place)
    if bits == 4:
        return f"{{{known} {low} {fma} low, low, one, less; {fma} $0, low, $2, $3;}}"
    high = _masked("high", form.high, bits * place + 4)
    return f"{{{known} {low} {high} {fma} high, high, one, less; {fma} low, low, one, high; {fma} $0, low, $2, $3;}}"


@triton.jit
def numbers(half, place: tl.constexpr, is_high: tl.constexpr, dtype: tl.constexpr, ptx: tl.constexpr):
    """Four bits of each half as numbers: codes, or the high bits of codes, and what these add to them."""
    base: tl.constexpr = _base(dtype, is_high)
    if ptx:
        asm: tl.constexpr = "{.reg .b32 to;" + _masked("to", base, 4 * place) + "mov.b32 $0, to;}"
        half = tl.inline_asm_elementwise(asm, "=r,r", [half], dtype=tl.int16, is_pure=True, pack=2)
    else:
        half = half >> 4 * place & 15 | base
    return half.to(dtype, bitcast=True)


@triton.jit
def weights(half, steps, place: tl.constexpr, bits: tl.constexpr, ptx: tl.constexpr):
    """The weights whose codes are at one place of the halves, rounded as steps are."""
    dtype: tl.constexpr = steps.dtype
    if bits == 4:
        step, zero = tl.split(steps)
        step, zero = step[:, :, :, :, None], zero[:, :, :, :, None]
    else:
        step, zero = steps, tl.full(steps.shape, -0.0, dtype)
    if ptx and dtype != tl.float32:
        step, zero = tl.broadcast_to(step, half.shape), tl.broadcast_to(zero, half.shape)
        asm: tl.constexpr = _in_full(dtype, bits, place)
        made = tl.inline_asm_elementwise(asm, "=r,r,r,r", [half, step, zero], dtype=tl.int16, is_pure=True, pack=2)
        return made.to(dtype, bitcast=True)
    code = (half >> bits * place & (1 << bits) - 1).to(tl.float32) - (1 << bits - 1)
    return (code * step.to(tl.float32) + zero.to(tl.float32)).to(dtype)


@cache
def has_ptx(device: torch.device) -> bool:
    """Whether kernels may have instructions of their own. The interpreter takes none, and older devices lack some."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
