"""Graphs: forwards of a few tokens a row, captured once on a CUDA device and replayed with other numbers.

A decode step is a few hundred small kernels, and to launch them one by one takes the host longer than the device takes
to run them. Rows are padded to a bucket, tokens to what the longest row has; what is padded goes to scratch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bough.ops.spans import FEW
from bough.state.ahead import MANY, Ahead
from bough.state.fixed import Fixed
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.recordings import Journal, Recordings
from bough.state.steady import Batch, Steady, steady
from bough.state.step import Step
from bough.state.transaction import Transaction

MOST = 256  # rows
EACH = (1, 2, 3, 5, FEW)  # tokens of a row that steps are captured for
CAPTURED = [next(each for each in EACH if each >= most) for most in range(FEW + 1)]  # by the tokens of the longest row
LEFT = 1 << 30  # bytes that are left to what is not captured
FULL, TILE = 320, 128  # tokens: more than FULL are whole tiles, of which a library's products are made well
ROOM = 8  # rows that there is room to record for, at the least
Shape = tuple[int, int, str]  # rows, tokens of each, and which parts of slots are recorded: all, the late ones, none
Compute = Callable[[Step, Tensor | None], tuple[Tensor, Tensor]]  # of a step, and rows that come with its tokens

log = logging.getLogger("bough")


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, the numbers it reads, and what it leaves: hidden rows and logits of all tokens, and recorded inputs."""

    graph: Any
    fixed: Fixed
    rows: Tensor | None  # those that come with tokens
    hidden: Tensor
    logits: Tensor
    journal: Journal | None = None
    into: Recordings | None = None  # which parts of it are recorded

    def replay(self, step: Step) -> None:
        """Do the step. What its states owe to steps before is done on the way, where these were captured too."""
        if self.journal is None or self.into is None:
            settle(step)
            self.fixed.fill(step)
            self.graph.replay()
            self.fixed.make_ready()
        else:
            assert step.recordings is not None
            places = self.journal.places(self.into, step.states, step.rows.counts, step.read, step.write)
            self.fixed.fill(step, places)
            try:
                self.graph.replay()
                step.recordings.after = self.journal.took(step.states, step.rows.counts, places)
                step.recordings.journal = self.journal
                self.fixed.make_ready()
            except BaseException:  # nobody knows whether slots were stored
                for state in step.states:
                    state.condition = "broken"
                raise

    def replay_steady(self, rows: Steady | Ahead, given: Tensor | None) -> Ahead | None:
        """Do a steady step, of which all is recorded or what is late; and make the same ready for the next tokens."""
        assert self.journal is not None and self.into is not None
        rows.take(self.journal, self.into)
        launched = False
        try:
            rows.fill(self.fixed)
            if given is not None:
                self.fixed.tokens[: rows.total].copy_(given)
            launched = True
            self.graph.replay()
            rows.finish(self.journal)
            if len(rows.states) >= MANY:
                return self.ahead_of(rows.states, rows.counts)
            self.fixed.make_ready()
        except BaseException:
            rows.abort()
            for state in rows.states if launched else ():  # nobody knows whether slots were stored
                state.condition = "broken"
            raise
        return None

    def ahead_of(self, states: Sequence[State], counts: Sequence[int]) -> Ahead:
        """The same step again, for whatever tokens."""
        assert self.journal is not None and self.into is not None
        return Ahead(self.fixed, self.journal, self.into, states, counts)

    def begin(self, rows: Ahead, kept: Tensor, chosen: Tensor, tokens: Sequence[int]) -> None:
        """Do a round of which the device alone knows where it begins."""
        rows.take_for_all()
        try:
            rows.begin(self.fixed, kept, chosen, tokens)
            self.graph.replay()
        except BaseException:
            rows.lose()
            raise


def settle(step: Step) -> None:
    """See to it that the slots of all rows are where their states are."""
    for state in step.states:
        state.settle()


class Graphs:
    """What one forward computes: steps of short rows by graphs, others plainly.

    What it gives holds until the next call, and so does what a plain step recorded.
    """

    def __init__(self, pool: Pool, compute: Compute, context: int) -> None:
        self.pool, self.compute, self.context = pool, compute, context
        self._journal, self._recordable = Journal(pool), pool.max_running
        self._captured: dict[Shape, Captured | None] = {}
        self.made = 0  # graphs, so far
        self._last: tuple[Captured, Steady | Ahead] | None = None  # the step before, if it was steady
        self._ahead: tuple[Captured, Ahead] | None = None  # the step that is likely to follow
        self._begun: tuple[Captured, Ahead] | None = None  # one under way whose states do not know where it began
        self._memory = torch.cuda.graph_pool_handle() if pool.device.type == "cuda" else None

    def __call__(self, step: Step, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The hidden rows and the logits of all its tokens."""
        assert self._begun is None, "a round is under way; land it first"
        shape = self._shape(step.rows.counts, recorded=any(step.recorded)) if self._takes(step) else None
        captured = None if shape is None else self._captured_for(shape, rows)
        if captured is None:
            settle(step)
            return self.compute(step, rows)
        total = step.rows.total
        if captured.rows is not None and rows is not None:
            captured.rows[:total].copy_(rows)
        self._last = self._ahead = None
        captured.replay(step)
        return captured.hidden[:total], captured.logits[:total]

    def steady(self, batch: Batch, given: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Feed states their tokens, if the step is steady and a graph records it: hidden rows and logits, or None."""
        assert self._begun is None, "a round is under way; land it first"
        planned = self._planned(batch)
        if planned is None:
            return None
        captured, rows = planned
        ahead = captured.replay_steady(rows, given)
        self._last, self._ahead = (captured, rows), None if ahead is None else (captured, ahead)
        return captured.hidden[: rows.total], captured.logits[: rows.total]

    def go_on(self, kept: Tensor, chosen: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Begin the next round of the states that are in one, before anybody knows how many tokens of that they keep.

        The device does (`kept` [R], one at the least). They are fed as many `tokens` as before, but first the one that
        was `chosen` [T] after those kept. Hidden rows and logits; None where that cannot be (`may_go_on`). Until it has
        landed, no other step may be taken.
        """
        if not self.may_go_on():
            return None
        assert self._ahead is not None
        (captured, rows), ahead, self._ahead = self._ahead, self._ahead, None
        captured.begin(rows, kept, chosen, tokens)
        self._begun = ahead
        return captured.hidden[: rows.total], captured.logits[: rows.total]

    def may_go_on(self) -> bool:
        """Whether there is a round that all its states are still in, and the next one can be launched behind it."""
        if self._last is None or any(state.transaction is None for state in self._last[1].states):
            return False
        if self._ahead is None:  # so few rows that it was not made ready
            captured, rows = self._last
            self._ahead = captured, captured.ahead_of(rows.states, rows.counts)
        return self._ahead[1].may_begin()

    def land(self, kept: Sequence[int]) -> list[Transaction]:
        """It is known how many tokens of the round before are kept: the transactions of the one that has begun."""
        assert self._begun is not None
        captured, rows = self._begun
        assert captured.journal is not None
        opened = rows.land(captured.journal, kept)
        self._last, self._begun = self._begun, None
        self._ahead = captured, captured.ahead_of(rows.states, rows.counts)
        return opened

    def lose(self) -> None:
        """Nobody will know how many tokens are kept: the states of a round that has begun are broken."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].lose()

    def _planned(self, batch: Batch) -> tuple[Captured, Steady | Ahead] | None:
        ahead, self._last, self._ahead = self._ahead, None, None  # whatever becomes of it
        if ahead is not None and len(batch) >= MANY and ahead[1].is_of(batch):
            return ahead
        rows = None if self._memory is None or len(batch) > MOST else steady(self.pool, batch)
        shape = None if rows is None else self._shape(rows.counts, recorded=rows.drafted)
        if rows is None or shape is None or shape[2] == "none":
            return None
        captured = self._captured_for(shape, None)
        return None if captured is None else (captured, rows)

    def _takes(self, step: Step) -> bool:
        counts = step.rows.counts
        return (
            self._memory is not None
            and 0 < len(counts) <= MOST
            and min(counts) > 0
            and step.rows.are_short
            and not any(step.rows.cuts)
            and step.masks is None
        )

    def _captured_for(self, shape: Shape, rows: Tensor | None) -> Captured | None:
        """The graph of a shape; None where there is no memory for it, or a model waits for the device."""
        if shape not in self._captured:
            self._captured[shape] = None
            if torch.cuda.mem_get_info(self.pool.device)[0] < LEFT:
                log.warning("steps of %d rows are not captured, and take longer: memory is short", shape[0])
                return None
            try:
                self._captured[shape] = self._capture(shape, rows)
                self.made += 1
            except Exception as error:  # noqa: BLE001 (whatever it is, the step is computed plainly, or fails there)
                log.warning("steps of %d rows are not captured, and take longer (%s)", shape[0], error)
                into = self._into(shape)
                if into is not None and not into.is_made:  # so many are not tried again
                    self._recordable = min(shape[0], self._recordable) // 2
                    self._begin_journal(0)
        return self._captured.get(shape)

    def _shape(self, counts: Sequence[int], *, recorded: bool) -> Shape | None:
        """That of the graph for a step; None where there is no room to record what it must."""
        each = CAPTURED[max(counts)]
        rows = bucket(len(counts), each)
        which = "all" if recorded else "late" if self._journal.late.parts else "none"
        needed = min(rows, self.pool.max_running)
        if which != "none" and not self._has_room(needed):
            return None if recorded else (rows, each, "none")
        return rows, each, which

    def _has_room(self, states: int) -> bool:
        """Whether so many can be recorded. Before others are dropped for more room, there must be some to be had."""
        if self._journal.states < states <= self._recordable:
            if torch.cuda.mem_get_info(self.pool.device)[0] < LEFT:
                log.warning("steps of %d rows are not recorded, and take longer: memory is short", states)
                self._recordable = self._journal.states
            else:
                self._begin_journal(min(self._recordable, max(ROOM, 2 * states)))
        return states <= self._journal.states

    def _into(self, shape: Shape) -> Recordings | None:
        return {"all": self._journal.all, "late": self._journal.late, "none": None}[shape[2]]

    def _begin_journal(self, states: int) -> None:
        """Have room for so many states. All that records in the one before is dropped."""
        self._journal.settle()
        if any(recorded != "none" for _, _, recorded in self._captured):
            torch.cuda.synchronize(self.pool.device)  # nothing of it may be under way
        self._captured = {shape: each for shape, each in self._captured.items() if shape[2] == "none"}
        self._journal, self._last, self._ahead = Journal(self.pool, states), None, None

    def _capture(self, shape: Shape, like: Tensor | None) -> Captured:
        rows, each, _ = shape
        fixed = Fixed(self.pool, rows, each, self.context)
        given = None if like is None else like.new_zeros(rows * each, like.shape[1])
        beside = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self.pool.device))
        into = self._into(shape)
        step = fixed.step(into)
        with torch.cuda.stream(beside):
            # Kernels are compiled and libraries set up before; and room is made for what is recorded, since nothing in
            # a graph's own memory lasts until its next replay.
            self.compute(step, given)
        torch.cuda.current_stream(self.pool.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=beside, capture_error_mode="thread_local"):
            hidden, logits = self.compute(step, given)
        return Captured(graph, fixed, given, hidden, logits, self._journal, into)


@cache
def bucket(rows: int, each: int = 1) -> int:
    """The least number of rows that is captured and holds so many: powers of two, and halves between them.

    Of many tokens it is as many as a library's products are made well of.
    """
    power = 1 << (rows - 1).bit_length()
    least = power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power
    tokens = least * each
    return least if tokens <= FULL else -(-tokens // TILE) * TILE // each
