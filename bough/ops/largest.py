"""The largest number of each row."""

from torch import Tensor

from bough.ops.twins import twins


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of x [R, N] in float32, and where it is, both [R]: of equal ones the first.

    It is not finite if one of them is not a number.
    """
    if (fast := twins(x)) is not None:
        found: tuple[Tensor, Tensor] = fast.largest(x)
        return found
    best, at = x.max(-1)
    return best.float(), at
