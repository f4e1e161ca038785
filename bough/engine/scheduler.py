"""Who starts next, and which sequence gets how many tokens of the next step. Ints in, ints out; no tensors."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

MOST_PASSED = 8  # times that a waiting sequence is overtaken
CONSIDERED = 32  # waiting sequences that may overtake others
READING = 8  # one in so many tokens of a step is for prompts, if there are any


class Pending(Protocol):
    """A running sequence, as far as planning goes."""

    @property
    def pending(self) -> int: ...


class Queued(Protocol):
    """A sequence that has yet to start."""

    passed: int  # how often one that came later started before it


Row = TypeVar("Row", bound=Pending)
Later = TypeVar("Later", bound=Queued)


def order(waiting: Sequence[Later], unread: Callable[[Later], int]) -> list[Later]:
    """Who starts first: those with the least to read, which is little where the cache knows the most of it.

    Nobody starves: whoever has been overtaken often enough comes before all that has not.
    """
    near = waiting[:CONSIDERED]
    overdue = [each for each in near if each.passed >= MOST_PASSED]
    return [*overdue, *sorted((each for each in near if each.passed < MOST_PASSED), key=unread), *waiting[CONSIDERED:]]


def plan(running: Sequence[Row], budget: int, turn: int = 0) -> list[tuple[Row, int]]:
    """Rows and their token counts, at most `budget` tokens in all but at least one; `turn` counts the steps.

    Sequences that need a single token come first, so that a long prompt never stalls those that are writing. If they
    are too many they take turns. Of what is left the oldest prompt gets at least a half, and those with the least to
    read get the rest: a short one does not wait for the end of a long one, which goes on all the same.
    """
    writers = [row for row in running if row.pending == 1]
    readers = [row for row in running if row.pending > 1]
    most = max(1, budget - budget // READING if readers else budget)
    if len(writers) > most:
        first = turn * most % len(writers)
        writers = [*writers[first:], *writers[:first]][:most]
    counts: dict[int, int] = {}
    left = budget - len(writers)
    if readers and left > 0:
        counts[0] = min(readers[0].pending, -(-left // 2))
        left -= counts[0]
        for at in sorted(range(1, len(readers)), key=lambda at: readers[at].pending):
            counts[at] = min(readers[at].pending, left)
            left -= counts[at]
        counts[0] += min(readers[0].pending - counts[0], left)
    return [*((row, 1) for row in writers), *((readers[at], counts[at]) for at in sorted(counts) if counts[at])]
