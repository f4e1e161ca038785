"""Where a prefill leaves resume points. Ints in, ints out.

A point costs a slot and the windows before it, so they are placed where another prompt is likely to resume: before the
last token (the prompt again), where the client asks for one, where it left a known path (others will leave it there
too), at turn boundaries, and now and then in between, wider apart the longer the prompt is.
"""

from collections.abc import Sequence

FEWEST = 4  # points a prompt may have whatever they cost
INTERIOR = 8  # points in between, at most
CLOSEST = 256  # tokens between these


def place(
    length: int,
    *,
    resumable: int,
    matched: int,
    boundaries: Sequence[int] = (),
    marks: Sequence[int] = (),
    point_tokens: int,
) -> list[int]:
    """The lengths in (resumable, length) at which to be resumable, in order.

    `point_tokens` is how many tokens' K and V a point weighs: all points together weigh no more than the prompt, the
    first few and those at `marks` aside. What comes first in this list of wishes goes first.
    """
    inside = sorted({at for at in boundaries if resumable < at < length - 1})
    wishes = [length - 1, *marks, matched, *inside[-1:], *inside[:1], *reversed(inside)]
    spacing = CLOSEST
    while spacing < max(point_tokens, length / INTERIOR):
        spacing *= 2  # the same places for prompts of about the same length
    grid = range(spacing * (resumable // spacing + 1), length - 1, spacing)
    wishes += [at for at in grid if all(abs(at - other) >= spacing // 2 for other in (matched, length - 1, *inside))]
    most = max(FEWEST, length // max(1, point_tokens), len(marks) + 2)
    chosen = [at for at in dict.fromkeys(wishes) if resumable < at < length]
    return sorted(chosen[:most])
