"""What a drafter is: it guesses the next tokens of a sequence, and the target checks every one of them.

A guess costs speed at worst, and the protocol is made so that the engine can hold to that:

- Nothing that a drafter says enters a text, a state or a cache. A draft token stands only while it equals the token
  that the target itself draws. Drafts are cut to the length asked for, and at the first id that is no token; ids on a
  device are clamped to the vocabulary instead, so that nobody waits to look at them.
- A drafter owns no memory of the pool. What it keeps there is a State of the engine's, lent for the length of a call:
  the engine forks, rewinds, saves and releases it, also when the drafter has failed. `propose` gives it back as long
  as it was. The target's state is lent to be read.
- It can be left out at any time: not told, not asked, closed for a sequence and begun again. A drafter that lacks
  something of a sequence drafts nothing for it, and without a draft the engine decodes plainly.
- So whatever it raises, the engine logs, closes it and goes on. PoolFull is no fault: there is no draft this time.
- It never waits for others, and its work a token is bounded. One with kinds runs forwards on the pool, which belongs
  to the engine's thread: it is called there, and is one of Bough's own. One without can be called from another thread
  and given up when it is late, since it holds nothing that anybody else uses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from bough.state.kinds import Kind
    from bough.state.live import State

Draft: TypeAlias = "Sequence[int] | Tensor"  # ids [k] on the host or, so that nobody waits for it, on the device

# choose(logits [N, V], rows, depth) → ids [N]: the tokens that requests `rows` (indices into the call) would draw from
# these logits at their depth-th next token (0: the next), with their own parameters and noise. Without waiting.
Choose = Callable[["Tensor", Sequence[int], int], "Tensor"]


@dataclass(frozen=True, slots=True)
class Grown:
    """Tokens that have become part of a sequence's text since it was last told of: a prompt, or a round's tokens.

    The last of them need not have been fed to the target yet. `hidden` [h, width] are the target's rows of the tokens
    before the last h of `tokens`, so that each row stands beside the token that followed it. There are as many as the
    engine has: one less at the start of a text, and one less where it was resumed without the row before; none for a
    drafter that does not read them.
    """

    sequence: int  # a number that no other sequence ever has; a fork is another sequence
    salt: str  # sequences of different salts must not learn from each other
    tokens: Sequence[int]
    hidden: "Tensor | None" = None
    state: "State | None" = None  # the drafter's own, exactly if it has kinds
    cuts: Sequence[int] = ()  # lengths at which the state is to have resume points, if it is fed past them

    @property
    def own(self) -> "State":
        return _there(self.state)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A draft that is asked for: what follows a sequence's text, all of which was told with `committed`."""

    sequence: int
    most: int  # tokens
    target: "State | None" = None  # the target's, to be read; it holds all tokens but the last
    state: "State | None" = None  # the drafter's own, exactly if it has kinds

    @property
    def own(self) -> "State":
        return _there(self.state)


def _there(state: "State | None") -> "State":
    assert state is not None, "a drafter with kinds is given its state"
    return state


class Drafter(Protocol):
    """Guesses for all rows of a round at once."""

    @property
    def kinds(self) -> "Sequence[Kind | None]":
        """What it keeps of each sequence, by layer of its own; empty if nothing."""

    @property
    def lag(self) -> int:
        """Which token of a text its state is fed first: an MTP head pairs token 1 with the row of token 0."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it is told the target's hidden rows; where nobody is, most are not computed."""

    def committed(self, rows: Sequence[Grown]) -> None:
        """Texts have grown. Told in order and without gaps; what was drafted and not accepted is never told."""

    def propose(self, rows: Sequence[Wanted], choose: Choose) -> Sequence[Draft]:
        """At most `most` tokens for each row; fewer, or none, where it has no idea."""

    def close(self, sequence: int) -> None:
        """Forget the sequence, which may be one never told of."""
