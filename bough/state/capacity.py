"""How much fits: the entries a sequence of some length takes, and the largest numbers for which a pool has room.

Ints only. A pool is full when it runs out of slabs, so everything is counted in slabs, as the pool does. Slots for all
sequences that may run at once are counted first, since the pool keeps them back.
"""

from collections.abc import Callable, Sequence

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


def slabs(layout: Layout, sequences: int, tokens: int, step_tokens: int, max_running: int) -> int:
    """Slabs for the pages of so many sequences of `tokens` tokens, the slots of all that may run, and scratch."""
    total = 0
    for unit, count in zip(layout.units, entries(layout, tokens, step_tokens), strict=True):
        held = sequences * count if unit.is_page else max(max_running, sequences)
        total += -(-(held + 1) // unit.per_slab)
    return total


def tokens_that_fit(layouts: Sequence[Layout], available: int, step_tokens: int, max_running: int, most: int) -> int:
    """The length that one sequence can reach with `available` slabs, at most `most`; all layouts share them."""
    return largest(
        most, lambda n: sum(slabs(each, 1, n, min(step_tokens, n), max_running) for each in layouts) <= available
    )


def sequences_that_fit(
    layouts: Sequence[Layout], available: int, tokens: int, step_tokens: int, max_running: int
) -> int:
    """How many sequences of `tokens` tokens fit at once, at most `max_running`."""
    step = min(step_tokens, tokens)
    return largest(
        max_running, lambda n: sum(slabs(each, n, tokens, step, max_running) for each in layouts) <= available
    )


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [0, most] that fits, given that all smaller ones do too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
