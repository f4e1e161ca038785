"""Graphs: forwards of a few tokens a row, captured once on a CUDA device and replayed with other numbers.

A decode step is a few hundred small kernels, and to launch them one by one takes the host longer than the device takes
to run them. Rows are padded to a bucket, tokens to what the longest row has; what is padded goes to scratch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bough.ops.spans import FEW
from bough.state.fixed import Fixed
from bough.state.pool import Pool
from bough.state.recordings import Turns
from bough.state.step import Step

MOST = 256  # rows
EACH = (1, 2, 3, 5, FEW)  # tokens of a row that steps are captured for
CAPTURED = [next(each for each in EACH if each >= most) for most in range(FEW + 1)]  # by the tokens of the longest row
LEFT = 1 << 30  # bytes that are left to what is not captured
TILE = 128  # tokens that a library's product takes at a time, where there are many
ROOM = 8  # rows that there is room to record for, at the least
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
    turns: Turns | None  # where inputs are recorded

    def replay(self, step: Step) -> None:
        """Do the step. What its states owe to the step before is done on the way, where that was captured too."""
        if self.turns is None or step.recordings is None:
            settle(step)
            self.fixed.fill(step)
            self.graph.replay()
        else:
            self.fixed.fill(step, 1 - self.turns.turn, self.turns.owed(step.states))
            self.graph.replay()
            step.recordings.lasting = self.turns.took(step.states)
        self.fixed.make_ready()


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
        self._turns, self._recordable = Turns(pool), pool.max_running
        self._captured: dict[tuple[int, int, bool], Captured | None] = {}
        self._memory = torch.cuda.graph_pool_handle() if pool.device.type == "cuda" else None

    def __call__(self, step: Step, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The hidden rows and the logits of all its tokens."""
        captured = self._captured_for(step, rows) if self._takes(step) else None
        if captured is None:
            settle(step)
            return self.compute(step, rows)
        total = step.rows.total
        if captured.rows is not None and rows is not None:
            captured.rows[:total].copy_(rows)
        captured.replay(step)
        return captured.hidden[:total], captured.logits[:total]

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

    def _captured_for(self, step: Step, rows: Tensor | None) -> Captured | None:
        """The graph for a step's shape; None where there is no memory for it, or a model waits for the device."""
        each = CAPTURED[max(step.rows.counts)]
        shape = (bucket(len(step.rows.counts), each), each, step.recordings is not None)
        if step.recordings is not None and not self._has_room(min(shape[0], self.pool.max_running)):
            return None
        if shape not in self._captured:
            self._captured[shape] = None
            if torch.cuda.mem_get_info(self.pool.device)[0] < LEFT:
                log.warning("steps of %d rows are not captured, and take longer: memory is short", shape[0])
                return None
            try:
                self._captured[shape] = self._capture(*shape, like=rows)
            except Exception as error:  # noqa: BLE001 (whatever it is, the step is computed plainly, or fails there)
                log.warning("steps of %d rows are not captured, and take longer (%s)", shape[0], error)
                if not self._turns.made:  # what there was memory for is given back, and so many are not tried again
                    self._turns, self._recordable = Turns(self.pool), min(shape[0], self._recordable) // 2
        return self._captured[shape]

    def _has_room(self, rows: int) -> bool:
        """Whether so many rows can be recorded. Where there was room for fewer, all that records there is dropped."""
        if rows > self._recordable:
            return False
        if self._turns.most < rows * FEW:
            self._turns.settle()
            if self._memory is not None and any(recorded for _, _, recorded in self._captured):
                torch.cuda.synchronize(self.pool.device)  # nothing of it may be under way
            self._captured = {shape: each for shape, each in self._captured.items() if not shape[2]}
            self._turns = Turns(self.pool, min(self._recordable, max(ROOM, 2 * rows)) * FEW)
        return True

    def _capture(self, rows: int, each: int, recorded: bool, like: Tensor | None) -> Captured:
        fixed = Fixed(self.pool, rows, each, self.context)
        given = None if like is None else like.new_zeros(rows * each, like.shape[1])
        beside = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self.pool.device))
        step = fixed.step(self._turns.room if recorded else None)
        with torch.cuda.stream(beside):
            # Kernels are compiled and libraries set up before; and room is made for what is recorded, since nothing in
            # a graph's own memory lasts until its next replay.
            self.compute(step, given)
        torch.cuda.current_stream(self.pool.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=beside, capture_error_mode="thread_local"):
            hidden, logits = self.compute(step, given)
        return Captured(graph, fixed, given, hidden, logits, self._turns if recorded else None)


@cache
def bucket(rows: int, each: int = 1) -> int:
    """The least number of rows that is captured and holds so many: powers of two, and halves between them.

    Libraries' products of many tokens are made of tiles, and are slower where some of these are not full: there it is
    as many as fill them.
    """
    power = 1 << (rows - 1).bit_length()
    least = power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power
    tokens = -(-least * each // TILE) * TILE
    return least if tokens <= 2 * TILE else tokens // each
