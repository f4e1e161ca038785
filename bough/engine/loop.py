"""The loop: a thread that turns submitted requests into steps until they are done.

Only this thread touches states, the pool, the cache and the model. Clients talk to it through handles and a queue.
"""

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from bough.cache.prefix_cache import PrefixCache
from bough.draft import Draft
from bough.engine import garbage
from bough.engine.budget import Budget
from bough.engine.drafting import DEEPEST, Drafting
from bough.engine.flights import Flights
from bough.engine.request import Handle
from bough.engine.runner import Runner
from bough.engine.scheduler import plan
from bough.engine.sequence import Sequence
from bough.engine.verify import verify
from bough.engine.waiting import Waiting
from bough.errors import BadLogits, PoolFull, RequestError
from bough.state.live import State
from bough.state.transaction import Transaction, commit

log = logging.getLogger("bough")
Result = TypeVar("Result")
HANDOVER = 1e-4  # seconds in which whoever waits for a first token gets the interpreter, before we tidy up
PACE = 0.02  # seconds between looks at a disk that is being written to, when there is nothing else to do


class Loop:
    """Waiting and running sequences, and the thread that works on them."""

    def __init__(
        self, runner: Runner, cache: PrefixCache, drafting: Drafting, *, max_running: int, step_tokens: int
    ) -> None:
        self.runner, self.cache, self.drafting = runner, cache, drafting
        self.max_running, self.budget = max_running, Budget(step_tokens)
        self._fed = 0  # tokens of the step that is under way
        self._inbox: queue.SimpleQueue[Sequence | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = Waiting(runner, cache, drafting)
        self._running: list[Sequence] = []
        self._short_of_memory = False  # too short to draft
        self.flights = Flights(runner, drafting, self._running, self)
        self._steps = self._submitted = self._received = 0
        self._captured = 0  # graphs when garbage was looked for last
        self._closed = False
        self._gate = threading.Lock()  # nothing is put into the inbox after the order to close
        self._thread = threading.Thread(target=self._work, name="bough-engine", daemon=True)
        cache.tiers.wake = lambda: self._inbox.put(_nothing)
        self._thread.start()
        # A thread that is inside torch while the interpreter goes down would abort the process.
        atexit.register(_close_at_exit, weakref.ref(self))

    def submit(self, sequence: Sequence) -> Handle:
        self._put(sequence)
        return sequence.handle

    def call(self, ask: Callable[[], Result]) -> Result:
        """Run something in the loop's thread, between two steps, and wait for what it gives."""
        future: Future[Result] = Future()

        def answer() -> None:
            try:
                future.set_result(ask())
            except BaseException as error:  # noqa: BLE001 (whoever asked gets it)
                future.set_exception(error)

        self._put(answer)
        return future.result()

    def _put(self, item: Sequence | Callable[[], None]) -> None:
        with self._gate:
            if self._closed:
                raise RequestError("the engine is closed; load it again")
            self._submitted += isinstance(item, Sequence)
            self._inbox.put(item)

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait, and how many run."""
        return self._submitted - self._received + len(self._waiting), len(self._running)

    def close(self) -> None:
        """Cancel what is under way and wait for the thread to end."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            if self.runner.pool.device.type == "cuda":
                torch.cuda.set_device(self.runner.pool.device)  # where kernels are launched
            while self._receive():
                self.cache.tiers.settle()
                self._drop_unwanted()
                for sequence, error in self._waiting.start(self._running, self.max_running):
                    self.fail([sequence], error)
                self._step()
                self._tidy()
            for sequence in [*self._running, *self._waiting]:
                sequence.cut_off()
                self.end(sequence, "cancelled")
            self.drafting.close()
            self.cache.close()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """A bug of our own ends the loop: nobody may be left waiting for it."""
        with self._gate:
            self._closed = True
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Sequence):
                self._waiting.append(item)
            elif item is not None:
                item()
        for sequence in [*self._running, *self._waiting]:
            sequence.handle.end(error=error)
        self.cache.abandon()

    def _receive(self) -> bool:
        """Take in what was submitted, waiting if there is nothing else to do. False when the engine closes."""
        idle = not self._running and self._waiting.is_idle and not self.flights
        while idle or not self._inbox.empty():
            try:
                item = self._inbox.get(timeout=PACE if self.cache.tiers.busy else None)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Sequence):
                self._waiting.append(item)
                self._received += 1
            else:
                item()
            idle = False
        return True

    def _tidy(self) -> None:
        """What compilers and captured graphs have just left stays, and need not be looked through for garbage again."""
        if (made := self.runner.graphs.made) != self._captured:
            self._captured = made
            garbage.leave_out()

    def _drop_unwanted(self) -> None:
        for sequence in (*self._running, *self._waiting):
            if sequence.handle.cancelled or sequence.request.is_late:
                sequence.cut_off()
                self.end(sequence, "cancelled" if sequence.handle.cancelled else "deadline")

    def _step(self) -> None:
        """One forward over what is planned. Whatever goes wrong ends those requests, not the engine."""
        self._steps += 1
        if self.flights:
            self.flights.land()
            return
        writes = any(sequence.pending == 1 for sequence in self._running)
        rows = plan(self._running, self.budget.tokens(beside_writers=writes), self._steps)
        before = {sequence: sequence.computed for sequence, _ in rows}
        self._fed = sum(count for _, count in rows)
        try:
            try:
                self._advance(rows, before)
                self._short_of_memory = False
                if rows:
                    self.budget.went_well()
            except PoolFull as error:
                self._make_room(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, its requests are told, and the others go on)
            self.hurt(before, self._fed, error)

    def hurt(self, before: Mapping[Sequence, int], tokens: int, error: Exception) -> None:
        """A step of so many tokens went wrong for these, which had computed so many before it.

        Where it was for want of memory, who has lost a state by that goes on from what the cache has of it.
        """
        alive = [sequence for sequence in before if not sequence.handle.done]
        for sequence in alive:
            if sequence.reason:  # it has all its tokens
                self.drafting.park(sequence)
                self._forget(sequence)
                sequence.finish(sequence.reason)
        others = [sequence for sequence in alive if not sequence.reason]
        if not isinstance(error, torch.OutOfMemoryError) or not self.budget.failed(tokens):
            self.fail(others, error)
            return
        if self.runner.pool.device.type == "cuda":
            torch.cuda.empty_cache()
        for sequence in reversed(others):
            if sequence.computed != before[sequence] or sequence.has_lost_its_state:
                self.drafting.park(sequence)
                self._take_back(sequence)
                self._waiting.put_first(sequence)

    def _advance(self, rows: list[tuple[Sequence, int]], before: Mapping[Sequence, int]) -> None:
        if not rows:
            return
        began, sequences = time.perf_counter(), [sequence for sequence, _ in rows]
        choosing = [s for s, count in rows if count == s.pending and s.wants_token]
        writing = [s for s in choosing if s.is_writing]
        alone = len(writing) == len(rows)
        if alone and self.flights.take_off(writing):
            return
        roomy = self.budget.has_room_for(len(rows) * (1 + DEEPEST)) and not self._short_of_memory
        drafts = self.drafting.drafts(writing, len(rows)) if roomy else {}
        self._fed += sum(map(len, drafts.values()))
        if alone and drafts and self.flights.take_off_with(writing, drafts, began):
            return
        hidden, logits, opened = self._forward(rows, choosing, drafts)
        accepted = self._choose(choosing, logits, drafts, opened)
        seconds, start = time.perf_counter() - began, 0
        if any(sequence.use is None for sequence in choosing):
            time.sleep(HANDOVER)
        for s, count in rows:
            if not s.handle.done:
                self._read(s, before[s], None if hidden is None else hidden[start : start + s.computed - before[s]])
            start += count + len(drafts.get(s, ()))
        for sequence in writing if alone else ():  # a prompt in between is no round's cost
            if sequence in accepted:
                drafted = len(drafts.get(sequence, ()))
                self.drafting.learn(sequence, drafted, accepted[sequence], seconds, len(rows))
        for sequence in sequences:
            if not sequence.handle.done and (reason := sequence.reason or _has_read(sequence)):
                self.end(sequence, reason)

    def fence(self) -> None:
        """What is computed next waits for copies that are under way."""
        self.cache.tiers.lane.fence()

    def _forward(
        self, rows: list[tuple[Sequence, int]], choosing: list[Sequence], drafts: dict[Sequence, Draft]
    ) -> tuple[Tensor | None, Tensor, dict[Sequence, Transaction]]:
        """Feed all rows, those with drafts in transactions; hidden rows if any are read, and logits to choose by."""
        batch = [(_state(s), s.tokens_to_feed(count)) for s, count in rows]
        cuts = [sorted(at for at in s.cuts if s.computed < at <= s.computed + count) for s, count in rows]
        wanted = [1 + len(drafts.get(s, ())) if s in choosing else 0 for s, _ in rows]
        read = any(s.request.score for s, _ in rows) or self.drafting.reads_hidden([s for s, _ in rows])
        self.cache.make_points_room(sum(map(len, cuts)))
        self.fence()
        opened = {sequence: _state(sequence).begin() for sequence in drafts}
        try:
            by_row = {row: drafts[s] for row, (s, _) in enumerate(rows) if s in drafts}
            hidden, logits = self.runner.forward(batch, wanted, cuts, by_row, hidden=read)
        except BaseException:
            for transaction in opened.values():
                transaction.commit(0)
            raise
        for (sequence, _), reached in zip(rows, cuts, strict=True):
            sequence.cuts.difference_update(reached)
        return hidden, logits, opened

    def _read(self, sequence: Sequence, before: int, hidden: Tensor | None) -> None:
        """A sequence has read tokens: others are told that they could go on from there."""
        prompt = sequence.request.prompt
        if before < len(prompt):
            self.cache.admit(_state(sequence), sequence.symbols, sequence.salt, ended=False)
            sequence.handle.prefilled = min(sequence.computed, len(prompt))
            if sequence.request.score:
                assert hidden is not None
                sequence.scores += self.runner.scores(hidden, sequence.tokens[before + 1 : sequence.computed + 1])
            if sequence.use is None and sequence.computed >= len(prompt):
                sequence.use = self.cache.used(prompt.symbols, sequence.salt, sequence.usage.cached_tokens)
        self.drafting.grew(sequence, sequence.computed - before, hidden)

    def _choose(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        drafts: dict[Sequence, Draft],
        opened: dict[Sequence, Transaction],
    ) -> dict[Sequence, int]:
        """Let each sequence take its next tokens: those of its draft that it would have chosen itself, and one more.

        Returns how many of its draft's tokens stood. A sequence that ends with one of them holds none after it.
        """
        rows = {s: 1 + len(drafts.get(s, ())) for s in sequences}
        if not rows:
            return {}
        try:
            verdicts = verify(logits, [(s, drafts.get(s, ())) for s in sequences])
        except BadLogits as error:
            return self._choose_others(error, rows, logits, drafts, opened)
        accepted, committed = {}, []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            kept = sequence.take(verdict.tokens)
            if sequence in opened:
                committed.append((opened[sequence], kept))
                sequence.usage.drafted_tokens += len(drafts[sequence])
                sequence.usage.accepted_tokens += min(kept, verdict.accepted)
            accepted[sequence] = verdict.accepted
        commit(committed)
        return accepted

    def _choose_others(
        self,
        error: BadLogits,
        rows: dict[Sequence, int],
        logits: Tensor,
        drafts: dict[Sequence, Draft],
        opened: dict[Sequence, Transaction],
    ) -> dict[Sequence, int]:
        """Some logits are not numbers: their sequences fail, or try again without a draft if they had one."""
        owners = [sequence for sequence, count in rows.items() for _ in range(count)]
        bad = {owners[row] for row in error.rows}
        for sequence in bad & opened.keys():
            opened[sequence].commit(0)
            self.drafting.park(sequence)
        self.fail([sequence for sequence in bad if sequence not in opened], error)
        kept = [row for row, owner in enumerate(owners) if owner not in bad]
        return self._choose([s for s in rows if s not in bad], logits[kept], drafts, opened)

    def _make_room(self, error: PoolFull) -> None:
        """Memory ran out: the cache gives some up, those that wait give up what they have found there, or the newest
        sequence gives up its own; it goes on when another has ended.
        """
        if error.needs and self.cache.make_room(error.needs):
            return
        if self._waiting.give_up_finds():
            return
        if not self._short_of_memory:
            self._short_of_memory = True  # once more, without drafts
            return
        if self.drafting.give_memory_back():
            return
        newest = self._running[-1]
        if len(self._running) > 1:
            self.drafting.end(newest)
            self.cache.admit(_state(newest), newest.symbols, newest.salt, ended=True)
            self._take_back(newest)
            self._waiting.put_back(newest)
        else:
            self.fail([newest], error)

    def _take_back(self, sequence: Sequence) -> None:
        """It gives its state back, to begin anew."""
        self._running.remove(sequence)
        sequence.release()
        sequence.scores = []

    def end(self, sequence: Sequence, reason: str) -> None:
        """The request is done: what was computed for it is kept."""
        if sequence.state is not None:
            self.drafting.end(sequence)
            if sequence.state.transaction is not None:  # a round that nobody will read
                sequence.state.transaction.commit(0)
            if sequence.state.condition == "ready":
                with suppress(torch.OutOfMemoryError):  # to settle it takes some; without it less is kept
                    self.cache.admit(sequence.state, sequence.symbols, sequence.salt, ended=True)
            if sequence.use is not None:
                self.cache.finished(sequence.use, sequence.symbols, len(sequence.written), sequence.salt)
        self._forget(sequence)
        sequence.finish(reason)

    def fail(self, sequences: list[Sequence], error: Exception) -> None:
        for sequence in sequences:
            self.drafting.park(sequence)
            self._forget(sequence)
            sequence.fail(error)

    def _forget(self, sequence: Sequence) -> None:
        self._waiting.release(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._waiting.has_room()
        else:
            self._waiting.remove(sequence)


def _has_read(sequence: Sequence) -> str | None:
    """Why it ends, if all that it wanted was to be read."""
    return None if sequence.pending or sequence.wants_token else "length"


def _nothing() -> None:
    """What wakes the loop: the disk has done something."""


def _close_at_exit(loop: "weakref.ref[Loop]") -> None:
    if (alive := loop()) is not None:
        alive.close()


def _state(sequence: Sequence) -> State:
    assert sequence.state is not None
    return sequence.state
