"""How much fits: the entries a sequence of some length takes, and the largest numbers for which a pool has room.

Ints only. A pool is full when it runs out of slabs, so everything is counted in slabs, as the pool does.
"""

from collections.abc import Callable

from bough.state.layout import Layout


def entries(layout: Layout, tokens: int, step_tokens: int) -> list[int]:
    """Entries of each unit that a sequence may hold while it grows to `tokens` in steps of up to `step_tokens`."""
    size = layout.page_tokens
    counts = []
    for unit in layout.units:
        count = -(-tokens // size) if unit.is_page else 1
        if unit.is_page and unit.reach is not None:  # window and step may begin anywhere in a page
            count = min(count, -(-(unit.reach + step_tokens - 1) // size) + 1)
        counts.append(count)
    return counts


def slabs(layout: Layout, sequences: int, tokens: int, step_tokens: int) -> int:
    """Slabs for so many sequences of `tokens` tokens, and for the scratch entries."""
    needs = zip(layout.units, entries(layout, tokens, step_tokens), strict=True)
    return sum(-(-(sequences * count + 1) // unit.per_slab) for unit, count in needs)


def tokens_that_fit(layout: Layout, available: int, step_tokens: int, most: int) -> int:
    """The length that one sequence can reach with `available` slabs, at most `most`."""
    return _largest(most, lambda tokens: slabs(layout, 1, tokens, min(step_tokens, tokens)) <= available)


def sequences_that_fit(layout: Layout, available: int, tokens: int, step_tokens: int, most: int) -> int:
    """How many sequences of `tokens` tokens fit at once, at most `most`."""
    return _largest(most, lambda count: slabs(layout, count, tokens, min(step_tokens, tokens)) <= available)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [0, most] that fits, given that all smaller ones do too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
