"""Which sequence gets how many tokens of the next step. Ints in, ints out; no tensors."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Pending(Protocol):
    """A sequence, as far as planning goes."""

    @property
    def pending(self) -> int: ...


Row = TypeVar("Row", bound=Pending)


def plan(running: Sequence[Row], budget: int) -> list[tuple[Row, int]]:
    """Rows and their token counts, at most `budget` tokens in all but at least one.

    Sequences that need a single token come first, so that a long prompt never stalls those that are writing; what is
    left goes to prompts in order of arrival, cut where the budget ends.
    """
    rows = [(row, 1) for row in running if row.pending == 1][: max(budget, 1)]
    left = budget - len(rows)
    for row in running:
        if row.pending > 1 and left > 0:
            count = min(row.pending, left)
            rows.append((row, count))
            left -= count
    return rows
