"""Budget: how many tokens a step may have.

What a step computes on its way takes memory that nobody has reserved: others may have taken it. Then steps become
smaller until there is enough, and later larger again. How long that takes is some times as long as memory was short,
since each time that larger steps fail the next try waits longer.
"""

import logging

BESIDE_WRITERS = 2048  # tokens of a step that others wait for
FEW = 64  # tokens of a step that has no memory for other reasons than their number, as a rule
PATIENCE = 256  # steps before larger ones are tried, at first

log = logging.getLogger("bough")


class Budget:
    """The most tokens of a step: as many as it may ever have, or fewer while memory is short."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._start_over()

    def _start_over(self) -> None:
        self._now = self.most
        self._patience, self._left = PATIENCE, 0  # steps before larger ones are tried, and those that are left of them
        self._failed = self._larger = False  # whether the last step did; whether they became larger, and not smaller

    @property
    def is_short(self) -> bool:
        """Whether there was no memory of late."""
        return self._now < self.most

    def tokens(self, *, beside_writers: bool) -> int:
        """Of the next step: few enough that those who write do not wait for long."""
        most = min(self._now, self.most)
        return min(most, BESIDE_WRITERS) if beside_writers else most

    def has_room_for(self, tokens: int) -> bool:
        return min(tokens, self.most) <= self._now

    def failed(self, tokens: int) -> bool:
        """There was no memory for a step of so many. False if that cannot have been for their number.

        Of few tokens that is believed when the next step fails too.
        """
        if tokens == 1 and self._failed:
            self._start_over()
            return False
        least = 1 if self._failed else min(FEW, self.most // 2)
        self._now = min(self._now, max(1, tokens // 2, least))
        if self._larger:
            self._patience *= 4
        self._left, self._failed, self._larger = self._patience, True, False
        log.warning("there is no memory for a step of %d tokens; the next ones have at most %d", tokens, self._now)
        return True

    def went_well(self) -> None:
        """A step had memory. What took it before may be gone."""
        self._failed = False
        self._left -= 1
        if self.is_short and self._left <= 0:
            if self._larger:  # which did not fail
                self._patience = max(PATIENCE, self._patience // 2)
            self._now, self._larger, self._left = 2 * self._now, True, self._patience
