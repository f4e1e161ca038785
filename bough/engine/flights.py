"""Flights: which steps are launched before the tokens of the one before are read, and what becomes of them.

A plain step flies (flight.py), and so does a draft round (rounds.py), while nothing that the host knows decides what
its sequences are fed next. One is in the air at a time; when it lands, the next one may have been launched already.
"""

import time
from collections.abc import Mapping
from typing import Protocol

from bough.draft import Draft
from bough.engine import rounds
from bough.engine.budget import Budget
from bough.engine.drafting import Drafting
from bough.engine.flight import Flight, can_fly, launch
from bough.engine.rounds import Round
from bough.engine.runner import Runner
from bough.engine.sequence import Sequence
from bough.engine.verify import Verdict
from bough.errors import BadLogits, PoolFull
from bough.state.transaction import commit


class Ground(Protocol):
    """What flights need of the loop."""

    budget: Budget

    def fence(self) -> None: ...  # before a launch
    def end(self, sequence: Sequence, reason: str) -> None: ...
    def fail(self, sequences: list[Sequence], error: Exception) -> None: ...
    def hurt(self, before: Mapping[Sequence, int], tokens: int, error: Exception) -> None: ...  # by a step of so many


class Flights:
    """The step whose tokens are yet to be read, if there is one."""

    def __init__(self, runner: Runner, drafting: Drafting, running: list[Sequence], ground: Ground) -> None:
        self.runner, self.drafting, self._running, self._ground = runner, drafting, running, ground
        self.allowed = runner.pool.device.type == "cuda"  # whether there is somebody who could wait for the host
        self._air: Flight | Round | None = None
        self._landed = 0.0  # when one was read last

    def __bool__(self) -> bool:
        return self._air is not None

    def take_off(self, sequences: list[Sequence]) -> bool:
        """Launch a plain step of all that run, if it can fly."""
        if not self._can_fly(sequences):
            return False
        self._ground.fence()
        self._air = launch(self.runner, sequences)
        return True

    def take_off_with(self, sequences: list[Sequence], drafts: dict[Sequence, Draft], began: float) -> bool:
        """Launch a draft round of all that run, if it can fly. To make the drafts was begun then."""
        made = [draft for each in sequences if isinstance(draft := drafts.get(each), list)]
        flies = self.allowed and self.drafting.reads_text_alone and len(made) == len(sequences)
        if not flies or not _all_can_fly(sequences, made):
            return False
        self._ground.fence()
        self._air = rounds.launch(self.runner, sequences, made, began)
        return True

    def _can_fly(self, sequences: list[Sequence]) -> bool:
        flies = self.allowed and all(map(can_fly, sequences))
        return flies and self.drafting.rests(sequences, len(sequences))

    def land(self) -> None:
        """Read the tokens of the step, after the next one is under way if that needs nothing but these."""
        air, self._air = self._air, None
        assert air is not None
        if isinstance(air, Flight):
            self._land(air)
        else:
            self._land_round(air)

    # Plain steps.

    def _land(self, flight: Flight) -> None:
        failure, going_on = None, flight.going_on()
        others = [flight.sequences[row] for row in going_on]
        alone = set(self._running) <= set(flight.sequences)
        if others and alone and not self._ground.budget.is_short and self._can_fly(others):
            try:
                chosen = flight.drawn.ids if len(others) == len(flight.sequences) else flight.drawn.ids[going_on]
                self._ground.fence()
                self._air = launch(self.runner, others, chosen)
            except PoolFull:
                pass  # there will be room, or somebody gives some up, when it is planned for
            except Exception as error:  # noqa: BLE001 (as in a step)
                failure = error
        try:
            sampled = flight.drawn.result()
        except Exception as error:  # noqa: BLE001 (as in a step)
            self._ground.fail([each for each in flight.sequences if not each.handle.done], error)
            return
        seconds = self._seconds(flight.began)
        for row, sequence in enumerate(flight.sequences):
            if not sequence.handle.done:
                self.drafting.learn(sequence, 0, 0, seconds, len(flight.sequences))
                self._take(sequence, Verdict([(sampled.tokens[row], sampled.logprobs[row])]), bad=row in sampled.bad)
        if failure is not None:
            lost = {each: each.computed for each in others if each.has_lost_its_state}
            self._ground.hurt(lost, 2 * len(others), failure)

    # Draft rounds.

    def _land_round(self, flight: Round) -> None:
        """The same of a draft round.

        A row whose logits were no numbers tries again without a draft, or fails if the next round has gone on from it.
        """
        try:
            after = self._followed(flight)
            verdicts, bad = flight.read()
            kept = [len(verdict.tokens) for verdict in verdicts]
            if after is not None:
                after.opened = self.runner.land(kept)
            else:
                alive = [row for row, sequence in enumerate(flight.sequences) if not sequence.handle.done]
                commit([(flight.opened[row], 0 if row in bad else kept[row]) for row in alive])
        except Exception as error:  # noqa: BLE001 (as in a step)
            self.runner.lose()
            lost = {each: each.computed for each in flight.sequences}
            self._ground.hurt(lost, 2 * sum(map(len, flight.fed)), error)
            return
        self._air = after
        seconds, rows = self._seconds(flight.began), len(flight.sequences)
        for row, (sequence, verdict) in enumerate(zip(flight.sequences, verdicts, strict=True)):
            if sequence.handle.done:
                continue
            if row in bad and after is None:
                self.drafting.park(sequence)
                continue
            beyond = None  # whether what this one goes on with was guessed right
            if after is not None and len(verdict.tokens) == len(flight.fed[row]):
                beyond = after.fed[row][0] == verdict.tokens[-1][0]
            if row not in bad:
                self._learn(flight, row, verdict, seconds, rows, beyond)
            if after is not None:
                after.astray[row] = not beyond
            self._take(sequence, verdict, bad=row in bad)

    def _learn(self, flight: Round, row: int, verdict: Verdict, seconds: float, rows: int, beyond: bool | None) -> None:
        """How a row's draft did, unless it was made for another text."""
        sequence, drafted = flight.sequences[row], len(flight.fed[row]) - 1
        sequence.usage.drafted_tokens += drafted
        sequence.usage.accepted_tokens += verdict.accepted
        if not flight.astray[row]:
            self.drafting.learn(sequence, drafted, verdict.accepted, seconds, rows, beyond)

    def _followed(self, flight: Round) -> Round | None:
        """The next round, launched on what may follow this one."""
        began, sequences = time.perf_counter(), flight.sequences
        if any(each.handle.done for each in sequences) or not set(self._running) <= set(sequences):
            return None
        if self._ground.budget.is_short:
            return None
        under_way = list(zip(sequences, flight.drafts, strict=True))
        if not self.drafting.is_sure(under_way) or not self.runner.may_go_on():
            return None
        fed = self.drafting.onward(under_way)
        if fed is None or not _all_can_fly(sequences, fed):
            return None
        self._ground.fence()
        try:
            return rounds.follow(self.runner, flight, fed, began)
        except PoolFull:
            return None  # as above

    def _seconds(self, began: float) -> float:
        """How long a step has taken that is read now."""
        now = time.perf_counter()
        seconds, self._landed = now - max(began, self._landed), now
        return seconds

    def _take(self, sequence: Sequence, verdict: Verdict, *, bad: bool) -> None:
        """Let a sequence take what was drawn for it."""
        try:
            if bad:
                raise BadLogits([0])
            sequence.take(verdict.tokens)
            if sequence.reason:
                self._ground.end(sequence, sequence.reason)
        except Exception as error:  # noqa: BLE001 (the others go on)
            self._ground.fail([sequence], error)


def _all_can_fly(sequences: list[Sequence], drafts: list[list[int]]) -> bool:
    return all(map(rounds.can_fly, sequences, drafts))
