"""The noise that tokens are drawn with: one number for each request, token index and token id, and nothing else.

It comes from integers that are scrambled one to one, in the same way on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def gumbel(seeds: Sequence[int], indices: Sequence[int], ids: Tensor) -> Tensor:
    """Noise for token ids [R, N] or [1, N] (int32), row r of it at token index indices[r] under seeds[r]: [R, N]."""
    keys = [_key(seed, index) for seed, index in zip(seeds, indices, strict=True)]
    halves = torch.tensor([[_signed(key), _signed(key >> 32)] for key in keys], dtype=torch.int32)
    low, high = halves.to(ids.device, non_blocking=True).tensor_split(2, 1)  # [R, 1]
    return _to_gumbel(_mix32_(_mix32_(ids * _signed(0x9E3779B1) + low).add_(high)))


def _to_gumbel(bits: Tensor) -> Tensor:
    """-log(-log(u)) in float32 of the u in (0, 1) that 32 random bits stand for.

    Computed in float64: what the logarithms of different devices disagree on is rounded away.
    """
    uniform = bits.double().add_(2.0**31 + 0.5).mul_(2.0**-32)  # half a step off 0 and 1
    return uniform.log_().neg_().log_().neg_().float()


def _key(seed: int, index: int) -> int:
    """64 bits for one token of one request."""
    step = 0x9E3779B97F4A7C15
    return _mix64(_mix64(seed + step) + index * step)


def _mix64(x: int) -> int:
    """Scramble 64 bits, one to one."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _mix32_(x: Tensor) -> Tensor:
    """Scramble 32 bits in place, one to one. Products wrap around; >> copies the sign, so its copies are masked."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(x: int) -> int:
    """The low 32 bits of x as an int32."""
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000
