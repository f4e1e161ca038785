"""Drafting: what the loop does so that a drafter's guesses make rounds longer, and nothing else different.

Each sequence that drafts has a Side: the number the drafter knows it by, the drafter's state where it keeps one, and
what it has yet to be told. The drafter's states live in a pool of their own in the target's arena, with a prefix cache
of their own: where that has nothing, the target resumes all the same, and the drafter starts from there.

Whatever a drafter raises, or when one that can be given up does not answer in time, it is dropped: its memory is given
back, and all requests go on plainly. For want of memory it is so with those that run: only if others after them have
none either is it dropped.
"""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from bough.cache.prefix_cache import PrefixCache
from bough.draft import Draft, Drafter, Grown, Wanted
from bough.draft.assistant import AssistantDrafter
from bough.draft.depth import Depth, Rates, RequestDepth
from bough.draft.ngram import NGram
from bough.engine.runner import Runner
from bough.engine.sampler import draw
from bough.engine.sequence import Sequence as Running
from bough.errors import PoolFull
from bough.models.model import Model
from bough.state.live import State

DEEPEST = 8  # tokens in a draft
SHORTAGES = 3  # times in a row that a drafter has no memory, after which it is given up
PIECE = 8192  # tokens of a resumed text that a drafter without state is told of at once
UNTOLD = 128  # tokens that may wait to be told while nothing is drafted
STREAK = 3  # drafts of a sequence that stood whole one after another, from which on the next may be thought to do so
SURE = 0.9  # how often it has to: a round that goes astray costs as much as ten save that are launched early
PATIENCE = 2.0  # seconds that a drafter without state may take

log = logging.getLogger("bough")
Result = TypeVar("Result")


class Aside:
    """A thread that can be given up: it ends with the process, whatever it is waiting for."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def ask(self, what: Callable[[], Result]) -> Result:
        """What it gives. Raises TimeoutError when it takes too long."""
        if self._asked is None:
            self._asked = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._asked,), name="bough-draft", daemon=True).start()
        answer: Future[Result] = Future()

        def work() -> None:
            try:
                answer.set_result(what())
            except BaseException as error:  # noqa: BLE001 (whoever asked gets it)
                answer.set_exception(error)

        self._asked.put(work)
        return answer.result(PATIENCE)

    def close(self) -> None:
        if self._asked is not None:
            self._asked.put(None)
            self._asked = None


def _serve(asked: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (what := asked.get()) is not None:
        what()


@dataclass(slots=True, eq=False)
class Side:
    """One sequence, as its drafter sees it."""

    number: int
    depth: RequestDepth
    streaks: Rates  # how often drafts stood whole that came after some that did
    state: State | None = None
    whole: bool = True  # whether the state holds the text from its beginning
    told: int = 0  # tokens of the text that the drafter knows of
    untold: int = 0  # tokens read since it was last told of all there were
    stood: int = 0  # drafts that did as a whole, the last ones
    rows: list[Tensor] = field(default_factory=list)  # hidden rows it has yet to be told of, if it reads them
    cuts: list[int] = field(default_factory=list)  # lengths at which the drafter's state is to have resume points


class Drafting:
    """A drafter, its memory, and the sequences it drafts for. Without a drafter it does nothing."""

    def __init__(
        self, drafter: Drafter | None, runner: Runner, cache: PrefixCache | None, *, deepest: int = DEEPEST
    ) -> None:
        self.drafter, self.runner, self.cache = drafter, runner, cache
        self.depth, self.streaks = Depth(deepest), Rates()
        self.failure: str | None = None  # why the drafter was dropped
        self._shortages = 0  # times in a row that it had no memory
        self._sides: dict[Running, Side] = {}
        self._numbers = itertools.count(1)
        self._aside = Aside()

    # A sequence comes and goes.

    def begin(self, sequence: Running, resumed: int) -> None:
        """A sequence starts with its first `resumed` tokens known to the target."""
        if self.drafter is None or sequence.request.params.draft is None or sequence.request.score:
            return
        greedy = sequence.request.params.temperature == 0
        side = self._sides[sequence] = Side(next(self._numbers), self.depth.begin(greedy=greedy), Rates(self.streaks))
        if not self.drafter.kinds or self.cache is None:
            return
        self.cache.tiers.lane.fence()
        try:
            self._restore(sequence, side, resumed)
        except (PoolFull, torch.OutOfMemoryError):
            self.park(sequence)

    def _restore(self, sequence: Running, side: Side, resumed: int) -> None:
        """Give the drafter a state for what the target resumes from, as far as its cache has it.

        One that reads tokens alone may be further.
        """
        assert self.drafter is not None and self.cache is not None
        state, lag = State(self.cache.pool), self.drafter.lag
        side.state = state  # so that it goes with the side, whatever comes now
        last = self.runner.last_row(sequence.state) if lag and resumed else None
        known = sequence.symbols[lag : lag + resumed + 1] if lag else sequence.symbols
        match = self.cache.acquire(known, sequence.salt)
        side.cuts = self.cache.points(match, sequence.request.boundaries, sequence.request.marks)
        if match.resumable >= resumed - (last is not None) or not lag:
            self.cache.restore(match, state)
        else:  # there is a gap that no hidden rows are left to fill
            self.cache.release(match)
            side.whole = False
        if not lag:
            side.told = state.length
        elif last is not None and (state.length < resumed or not side.whole):
            side.rows.append(last[None])

    def end(self, sequence: Running) -> None:
        """The sequence gives its state back; so does the drafter, whose cache keeps what is whole."""
        side = self._sides.get(sequence)
        if side is None:
            return
        with suppress(torch.OutOfMemoryError):  # as with the target's state, less is kept then
            if side.state is not None and self._tell([sequence]):
                self._keep(sequence, side, ended=True)
        self.park(sequence)

    def _keep(self, sequence: Running, side: Side, *, ended: bool) -> None:
        if side.state is not None and side.whole and self.cache is not None and self.drafter is not None:
            self.cache.admit(side.state, sequence.symbols[self.drafter.lag :], sequence.salt, ended=ended)

    # A round.

    def drafts(self, sequences: Sequence[Running], rows: int) -> dict[Running, Draft]:
        """Guesses for sequences about to write their next token, in a step of so many rows."""
        wanted: list[tuple[Running, int]] = []
        for sequence in sequences:
            if (side := self._sides.get(sequence)) is not None:
                most = side.depth.choose(rows, sequence.limit - len(sequence.tokens) - 1)
                if most > 0:
                    wanted.append((sequence, most))
        return self._proposed(wanted)

    @property
    def reads_text_alone(self) -> bool:
        """Whether what it says of a text depends on nothing else."""
        return self.drafter is not None and not self.drafter.kinds and not self.drafter.reads_hidden

    def is_sure(self, rounds: Sequence[tuple[Running, Sequence[int]]]) -> bool:
        """Whether all drafts of rounds that are under way are likely to stand, and drafts as long to be the best next.

        If not, the next round would be made for another text, and give one token.
        """
        for sequence, draft in rounds:
            side, left = self._sides.get(sequence), sequence.limit - len(sequence.tokens) - len(draft) - 2
            if side is None or side.stood < STREAK or side.streaks.first(1)[0] < SURE:
                return False
            if side.depth.choose(len(rounds), left) != len(draft):
                return False
        return True

    def onward(self, rounds: Sequence[tuple[Running, Sequence[int]]]) -> list[list[int]] | None:
        """What follows these drafts if they stand: for each a token, and a draft as long as before. None: unknown."""
        made, guesses = self._proposed([(sequence, 2 * len(draft) + 1) for sequence, draft in rounds]), []
        for sequence, draft in rounds:
            guess, count = made.get(sequence, ()), len(draft)
            if isinstance(guess, Tensor) or len(guess) <= 2 * count or list(guess[:count]) != list(draft):
                return None
            guesses.append(list(guess[count:]))
        return guesses

    def _proposed(self, wanted: list[tuple[Running, int]]) -> dict[Running, Draft]:
        """Guesses of at most so many tokens."""
        if not wanted or not self._tell([sequence for sequence, _ in wanted]):
            return {}
        sides = [self._sides[sequence] for sequence, _ in wanted]
        asked = [
            Wanted(side.number, most, target=sequence.state, state=side.state)
            for side, (sequence, most) in zip(sides, wanted, strict=True)
        ]

        self._make_room([most for _, most in wanted])

        def choose(logits: Tensor, which: Sequence[int], depth: int) -> Tensor:
            return draw(logits, [wanted[i][0].sampling_at(depth) for i in which])[0]

        def propose(drafter: Drafter) -> dict[Running, Draft]:
            drafts = zip(wanted, drafter.propose(asked, choose), strict=False)
            usable = {sequence: _usable(draft, most, self.runner.model) for (sequence, most), draft in drafts}
            for sequence, draft in usable.items():
                if sequence.matcher is not None and isinstance(draft, Tensor):
                    usable[sequence] = draft.tolist()  # what may follow it is worked out on the host
            return {sequence: draft for sequence, draft in usable.items() if len(draft)}

        made = self._guarded(propose)
        if made is not None:
            self._shortages = 0
        return made or {}

    def rests(self, sequences: Sequence[Running], rows: int) -> bool:
        """Whether it has nothing to say about these now, and can be told of their next tokens later."""
        known = [sequence for sequence in sequences if sequence in self._sides]
        return not known or (isinstance(self.drafter, NGram) and not self.drafts(known, rows))

    def reads_hidden(self, sequences: Sequence[Running]) -> bool:
        """Whether the hidden rows of any of these are to be given to `grew`."""
        reads = self.drafter is not None and self.drafter.reads_hidden
        return reads and any(sequence in self._sides for sequence in sequences)

    def grew(self, sequence: Running, count: int, hidden: Tensor | None) -> None:
        """The target has read so many tokens, and the text may have grown past them."""
        side = self._sides.get(sequence)
        if side is None or self.drafter is None:
            return
        side.untold += count
        if self.drafter.reads_hidden:
            assert hidden is not None and len(hidden) == count
            side.rows = [torch.cat([*side.rows, hidden])] if len(side.rows) == 16 else [*side.rows, hidden]
        reading, told = sequence.computed < len(sequence.request.prompt), side.told
        ready = not (reading or side.untold >= UNTOLD) or self._tell([sequence])
        if not ready and side.told == told and side.untold > 4 * UNTOLD:
            self.park(sequence)  # there is no memory for it, and what waits to be told takes memory too
        elif side.state is not None and sequence.computed <= len(sequence.request.prompt):
            self._keep(sequence, side, ended=False)

    def give_memory_back(self) -> bool:
        """Memory is too short for drafters: those with states go on without. False: there are none."""
        stateful = [sequence for sequence, side in self._sides.items() if side.state is not None]
        for sequence in stateful:
            self.park(sequence)
        return bool(stateful)

    def park(self, sequence: Running) -> None:
        """Draft no more for a sequence."""
        if (side := self._sides.pop(sequence, None)) is not None:
            self._close(side)

    def learn(
        self,
        sequence: Running,
        drafted: int,
        accepted: int,
        seconds: float,
        rows: int,
        beyond: bool | None = None,
    ) -> None:
        """How a round went; and whether the token after its draft was guessed right, if it came to that."""
        if (side := self._sides.get(sequence)) is None:
            return
        side.depth.observe(drafted, accepted, seconds, rows)
        went_on = 0 < drafted == accepted and beyond is not False
        if side.stood >= STREAK and drafted:
            for streaks in (side.streaks, self.streaks):
                streaks.learn(1, int(went_on))
        side.stood = side.stood + 1 if went_on else 0

    def _tell(self, sequences: Sequence[Running]) -> bool:
        """Bring the drafter up to date on these texts. False: it cannot draft for them now."""
        grown, told = [], list[tuple[Side, int, bool]]()
        for sequence in sequences:
            side = self._sides[sequence]
            known = sequence.computed + 1  # the token after the last one read; without it that one's row has no pair
            if isinstance(self.drafter, NGram):  # which takes no rows, and is told while a step is under way
                known = min(known, len(sequence.tokens))
            if side.told < known <= len(sequence.tokens):
                most = side.told + side.untold + PIECE  # a long text that was resumed is told little by little
                level = side.state is not None or known <= most
                upto = known if level else most
                rows = torch.cat(side.rows) if level and side.rows else None
                tokens = sequence.tokens[side.told : upto]
                cuts = [cut for cut in side.cuts if side.told < cut <= upto]
                grown.append(Grown(side.number, sequence.salt or "", tokens, rows, side.state, cuts))
                told.append((side, upto, level))
        self._make_room([len(each.tokens) for each in grown], points=sum(len(each.cuts) for each in grown))

        def tell(drafter: Drafter) -> bool:
            drafter.committed(grown)
            return True

        done = not grown or self._guarded(tell) is not None
        for side, upto, level in told:
            if done:
                side.told = upto
                if level:
                    side.untold, side.rows = 0, []
            elif side.state is not None and self.drafter is not None and not self.drafter.lag:
                side.told = side.state.length  # memory ran out on the way; it goes on from there
        return done and all(level for _, _, level in told)

    def _make_room(self, tokens: Sequence[int], points: int = 0) -> None:
        """Have the cache give up what so many new tokens of each state, and resume points, may take. Best effort."""
        if self.cache is not None and tokens:
            self.cache.make_points_room(points)
            size = self.cache.pool.layout.page_tokens
            pages = sum(-(-count // size) + 1 for count in tokens)
            needs = [pages if unit.is_page else len(tokens) for unit in self.cache.pool.layout.units]
            self.cache.make_room(needs)

    def clear(self) -> None:
        """Forget what was kept of texts that have ended."""
        if self.cache is not None:
            self.cache.clear()
        if isinstance(self.drafter, NGram):
            self.drafter.clear()

    def close(self) -> None:
        """No sequence is left."""
        self._aside.close()

    # Faults.

    def _guarded(self, ask: Callable[[Drafter], Result]) -> Result | None:
        """What the drafter answers; None if it has no memory now, or has failed and is gone."""
        if self.drafter is None:
            return None
        if self.cache is not None:
            self.cache.tiers.lane.fence()
        drafter = self.drafter
        try:
            if drafter.kinds or isinstance(drafter, NGram | AssistantDrafter):  # our own, and bounded
                answer = ask(drafter)
            else:
                answer = self._aside.ask(lambda: ask(drafter))
        except PoolFull:
            return None  # no draft this time
        except torch.OutOfMemoryError as error:  # its states may be broken
            self._shortages += 1
            if self._shortages == SHORTAGES:
                self._drop(error)
            else:
                log.warning("the drafter had no memory (%s); the requests that run go on without it", error)
                self._park_all()
            return None
        except BaseException as error:  # noqa: BLE001 (whatever it is, drafting ends and requests go on)
            self._drop(error)
            return None
        return answer

    def _park_all(self) -> None:
        for sequence in list(self._sides):
            self.park(sequence)

    def _close(self, side: Side) -> None:
        if side.state is not None:
            side.state.release()
            side.state = None
        self._guarded(lambda drafter: drafter.close(side.number))

    def _drop(self, error: BaseException) -> None:
        """Do without the drafter from here on."""
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        log.warning("the drafter failed and is not used any more (%s); decoding goes on without it", why)
        self.failure, self.drafter = why, None
        self._park_all()
        if self.cache is not None:
            self.cache.clear()


def _usable(draft: Draft, most: int, target: Model) -> Draft:
    """A draft cut to what was asked for, and to what are tokens at all."""
    if isinstance(draft, Tensor):
        (_,) = draft.shape
        return draft[:most].to(target.device, torch.int64).clamp(0, target.vocab_size - 1)
    wrong = next((i for i, token in enumerate(draft) if not 0 <= token < target.vocab_size), len(draft))
    return [int(token) for token in draft[: min(most, wrong)]]
