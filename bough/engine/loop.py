"""The loop: a thread that turns submitted requests into steps until they are done.

Only this thread touches states, the pool and the model. Clients talk to it through handles and a queue.
"""

import atexit
import queue
import threading
import weakref
from collections import deque

from torch import Tensor

from bough.engine.request import Handle
from bough.engine.runner import Runner
from bough.engine.sampler import sample
from bough.engine.scheduler import plan
from bough.engine.sequence import Sequence
from bough.errors import BadLogits, PoolFull, RequestError
from bough.state.live import State


class Loop:
    """Waiting and running sequences, and the thread that works on them."""

    def __init__(self, runner: Runner, *, max_running: int, step_tokens: int) -> None:
        self.runner, self.max_running, self.step_tokens = runner, max_running, step_tokens
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._preempted: set[Sequence] = set()  # those among the waiting that had to give their memory back
        self._closed = False
        self._gate = threading.Lock()  # nothing is put into the inbox after the order to close
        self._thread = threading.Thread(target=self._work, name="bough-engine", daemon=True)
        self._thread.start()
        # A thread that is inside torch while the interpreter goes down would abort the process.
        atexit.register(_close_at_exit, weakref.ref(self))

    def submit(self, sequence: Sequence) -> Handle:
        with self._gate:
            if self._closed:
                raise RequestError("the engine is closed; load it again")
            self._inbox.put(sequence)
        return sequence.handle

    def close(self) -> None:
        """Cancel what is under way and wait for the thread to end."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._receive():
                self._drop_cancelled()
                self._admit()
                self._step()
            for sequence in [*self._running, *self._waiting]:
                sequence.cut_off()
                self._end(sequence, "cancelled")
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """A bug of our own ends the loop: nobody may be left waiting for it."""
        with self._gate:
            self._closed = True
        while not self._inbox.empty():
            if (sequence := self._inbox.get()) is not None:
                self._waiting.append(sequence)
        for sequence in [*self._running, *self._waiting]:
            sequence.handle.end(error=error)

    def _receive(self) -> bool:
        """Take in what was submitted, waiting if there is nothing else to do. False when the engine closes."""
        idle = not self._running and not self._waiting
        while idle or not self._inbox.empty():
            sequence = self._inbox.get()
            if sequence is None:
                return False
            self._waiting.append(sequence)
            idle = False
        return True

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in (*self._running, *self._waiting) if s.handle.cancelled]:
            sequence.cut_off()
            self._end(sequence, "cancelled")

    def _admit(self) -> None:
        """Start waiting sequences. One that had to give its memory back waits until another has ended."""
        while self._waiting and len(self._running) < self.max_running:
            if self._waiting[0] in self._preempted and self._running:
                return
            sequence = self._waiting.popleft()
            self._preempted.discard(sequence)
            sequence.state = State(self.runner.pool)
            self._running.append(sequence)

    def _step(self) -> None:
        """One forward over what is planned. Whatever goes wrong ends those requests, not the engine."""
        rows = plan(self._running, self.step_tokens)
        try:
            self._advance(rows)
        except PoolFull as error:
            self._make_room(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, its requests are told, and the others go on)
            self._fail([s for s, _ in rows if not s.handle.done], error)

    def _advance(self, rows: list[tuple[Sequence, int]]) -> None:
        if not rows:
            return
        batch = [(_state(s), s.tokens[s.computed : s.computed + count]) for s, count in rows]
        wanted = [i for i, (s, count) in enumerate(rows) if count == s.pending and s.wants_token]
        hidden, logits = self.runner.forward(batch, wanted)
        start = 0
        for sequence, count in rows:
            sequence.handle.prefilled = min(sequence.computed, len(sequence.request.prompt))
            if sequence.request.score:
                following = sequence.tokens[sequence.computed - count + 1 : sequence.computed + 1]
                sequence.scores += self.runner.scores(hidden[start : start + count], following)
            start += count
            if not sequence.pending and not sequence.wants_token:
                self._end(sequence, "length")
        if wanted:
            self._choose([rows[i][0] for i in wanted], logits)

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> None:
        try:
            sampled = sample(logits, [s.sampling for s in sequences])
        except BadLogits as error:
            self._fail([sequences[row] for row in error.rows], error)
            kept = [i for i in range(len(sequences)) if i not in error.rows]
            if kept:
                self._choose([sequences[i] for i in kept], logits[kept])
            return
        for sequence, token, logprobs in zip(sequences, sampled.tokens, sampled.logprobs, strict=True):
            reason = sequence.append(token, logprobs)
            if reason:
                self._end(sequence, reason)

    def _make_room(self, error: PoolFull) -> None:
        """Memory ran out: the newest sequence gives its state back and starts over when another has ended."""
        newest = self._running.pop()
        if self._running:
            newest.release()
            newest.scores = []
            self._preempted.add(newest)
            self._waiting.appendleft(newest)
        else:
            newest.fail(error)

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._forget(sequence)
        sequence.finish(reason)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        for sequence in sequences:
            self._forget(sequence)
            sequence.fail(error)

    def _forget(self, sequence: Sequence) -> None:
        self._preempted.discard(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._preempted.clear()  # there is room again
        else:
            self._waiting.remove(sequence)


def _close_at_exit(loop: "weakref.ref[Loop]") -> None:
    if (alive := loop()) is not None:
        alive.close()


def _state(sequence: Sequence) -> State:
    assert sequence.state is not None
    return sequence.state
