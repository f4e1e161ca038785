"""Drafts without a network: what came after the same words before, in the text itself or in a sibling's.

A Lookup indexes one text as it grows: for each n-gram where it last ended, and for each such place the one before it.
The end of the text is matched with the last few places where its n-gram stood, longer n-grams first, and the longest
match wins. So a token costs a few dictionary entries, and a draft a bounded search, however long the text is.

Siblings remembers, for sequences of one salt, which token followed an n-gram last; drafts walk from one to the next.
Salts share nothing. Its entries are bounded, and those unused for the longest time go first.

The longer the match, the longer the draft. Knows tokens; no torch, no models, no state.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from bough.draft import Choose, Draft, Grown, Wanted

if TYPE_CHECKING:
    from bough.state.kinds import Kind

SIZES = (5, 2)  # of the n-grams that a text is indexed by
PLACES = 8  # where an n-gram stood before that are looked at
LONGEST = 32  # match that makes a difference

SIBLING_SIZES = (8, 4)
ENTRIES = 1 << 16  # of a salt, each some 170 bytes
SALTS = 8
LEARNT = 2048  # tokens at the end of what a text has grown by that siblings may learn from


def reach(match: int) -> int:
    """How many tokens a match of so many is good for."""
    return 2 * (match - 1)


class Lookup:
    """One text, and where its n-grams stood."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: list[dict[int, int]] = [{} for _ in SIZES]  # hash of an n-gram → the place after it, the last one
        self._before: list[list[int]] = [[] for _ in SIZES]  # by place: the one before it of the same hash, or 0

    def extend(self, tokens: Sequence[int]) -> None:
        """The text has grown. An n-gram is entered once there is a token after it, so the end does not find itself."""
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        for size, last, before in zip(SIZES, self._last, self._before, strict=True):
            for place in range(start, end):
                key = hash(tuple(self.tokens[place - size : place])) if place >= size else None
                before.append(last.get(key, 0) if key is not None else 0)
                if key is not None:
                    last[key] = place

    def match(self) -> tuple[int, int]:
        """The longest match of the end of the text with what ended before a place, and that place; (0, 0): none.

        Of equally long ones it is the latest.
        """
        for size, last, before in zip(SIZES, self._last, self._before, strict=True):
            best = (0, 0)
            place = last.get(hash(tuple(self.tokens[-size:])), 0) if len(self.tokens) >= size else 0
            for _ in range(PLACES):
                if not place:
                    break
                length = self._common(place)
                if length > best[0]:
                    best = (length, place)
                place = before[place]
            if best[0] >= size:  # less is a collision of hashes
                return best
        return (0, 0)

    def _common(self, place: int) -> int:
        """How many tokens before the place equal those at the end."""
        tokens, length = self.tokens, 0
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def after(self, place: int, count: int) -> list[int]:
        """The tokens from a place on; where they run into the end, as if the text went on like this."""
        period = len(self.tokens) - place
        return [self.tokens[place + i % period] for i in range(count)]


class Siblings:
    """What followed n-grams in all texts of one salt."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self._next: OrderedDict[int, int] = (
            OrderedDict()
        )  # hash of an n-gram → the token after it; the longest unused first

    def __len__(self) -> int:
        return len(self._next)

    def learn(self, tokens: Sequence[int], start: int) -> None:
        """Remember tokens[start:], each by the n-grams before it."""
        for size in SIBLING_SIZES:
            for at in range(max(start, size), len(tokens)):
                self._put(hash(tuple(tokens[at - size : at])), tokens[at])
        while len(self._next) > self.entries:
            self._next.popitem(last=False)

    def _put(self, key: int, token: int) -> None:
        self._next[key] = token
        self._next.move_to_end(key)

    def match(self, tokens: Sequence[int]) -> int:
        """The size of the largest n-gram at the end of the text whose next token is known, or 0."""
        sizes = (size for size in SIBLING_SIZES if len(tokens) >= size)
        return next((size for size in sizes if hash(tuple(tokens[-size:])) in self._next), 0)

    def walk(self, tokens: Sequence[int]) -> Iterator[int]:
        """The tokens that followed, one after the other, as long as they are known."""
        end = list(tokens[-max(SIBLING_SIZES) :])
        while size := self.match(end):
            key = hash(tuple(end[-size:]))
            token = self._next[key]
            self._put(key, token)
            yield token
            end.append(token)


class NGram:
    """The drafter: a Lookup for each sequence, and Siblings for each salt."""

    kinds: "Sequence[Kind | None]" = ()
    lag, reads_hidden = 0, False

    def __init__(self, *, entries: int = ENTRIES, salts: int = SALTS) -> None:
        self.entries, self.salts = entries, salts
        self._texts: dict[int, tuple[Lookup, str]] = {}
        self._siblings: dict[str, Siblings] = {}  # the longest unused first

    def committed(self, rows: Sequence[Grown]) -> None:
        for row in rows:
            text, _ = self._texts.setdefault(row.sequence, (Lookup(), row.salt))
            text.extend(row.tokens)
            self._of(row.salt).learn(text.tokens, len(text.tokens) - min(len(row.tokens), LEARNT))

    def propose(self, rows: Sequence[Wanted], choose: Choose | None = None) -> Sequence[Draft]:
        """The tokens that followed before; what a request would draw makes no difference to it."""
        return [self.draft(row.sequence, row.most) for row in rows]

    def draft(self, sequence: int, most: int) -> list[int]:
        """The longer match decides, the text's own if they are equal."""
        if sequence not in self._texts:
            return []
        text, salt = self._texts[sequence]
        length, place = text.match()
        siblings = self._of(salt)
        known = siblings.match(text.tokens)
        if known > length:
            return list(islice(siblings.walk(text.tokens), min(most, reach(known))))
        return text.after(place, min(most, reach(length))) if length else []

    def clear(self) -> None:
        """Forget what ended texts have taught."""
        self._siblings.clear()

    def close(self, sequence: int) -> None:
        self._texts.pop(sequence, None)

    def _of(self, salt: str) -> Siblings:
        """The siblings of a salt, now the latest used."""
        siblings = self._siblings[salt] = self._siblings.pop(salt) if salt in self._siblings else Siblings(self.entries)
        while len(self._siblings) > self.salts:
            del self._siblings[next(iter(self._siblings))]
        return siblings
