"""Stop strings, found in text that arrives piece by piece. Knows nothing of tokens."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string begins in it.

    Only text that may turn out to be the beginning of a stop string is held back. The text is cut where the earliest
    stop string in it begins, even when a later and shorter one is complete first. The cost is linear in the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""
        self._found: int | None = None  # where in `_held` the earliest complete stop string begins
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is now certain, and whether a stop string has ended it."""
        if self.stopped:
            return "", True
        start, self._held = len(self._held), self._held + text
        certain = 0  # held text before here is in no stop string
        for end, char in enumerate(text, start + 1):
            for search in self._searches:
                if search.advance(char):
                    begin = end - len(search.stop)
                    self._found = begin if self._found is None else min(begin, self._found)
            certain = end - max((search.matched for search in self._searches), default=0)
            if self._found is not None and self._found <= certain:
                return self.finish(), True
        if self._found is not None:
            self._found -= certain
        out, self._held = self._held[:certain], self._held[certain:]
        return out, False

    def finish(self) -> str:
        """The text held back, when no more will come. `stopped` then says whether a stop string ended it."""
        self.stopped = self._found is not None
        out, self._held = self._held[: self._found], ""
        return out


class _Search:
    """Knuth-Morris-Pratt: how much of the start of `stop` the text so far ends with."""

    def __init__(self, stop: str) -> None:
        assert stop, "a stop string is not empty"
        self.stop = stop
        self.matched = 0
        self._shorter = [0, 0]  # [n]: the next shorter match when n characters match
        for char in stop[1:]:
            shorter = self._shorter[-1]
            while shorter and stop[shorter] != char:
                shorter = self._shorter[shorter]
            self._shorter.append(shorter + (stop[shorter] == char))

    def advance(self, char: str) -> bool:
        """Read one character; whether it completes the stop string."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._shorter[self.matched]
        self.matched += self.stop[self.matched] == char
        complete = self.matched == len(self.stop)
        if complete:
            self.matched = self._shorter[self.matched]
        return complete
