"""The loop: a thread that turns submitted requests into steps until they are done.

Only this thread touches states, the pool and the model. Clients talk to it through handles and a queue.
"""

import queue
import threading
from collections import deque

from torch import Tensor

from bough.engine.request import Handle
from bough.engine.runner import Runner
from bough.engine.sampler import BadLogits, sample
from bough.engine.scheduler import plan
from bough.engine.sequence import Sequence
from bough.errors import PoolFull, RequestError
from bough.state.live import State


class Loop:
    """Waiting and running sequences, and the thread that works on them."""

    def __init__(self, runner: Runner, *, max_running: int, step_tokens: int) -> None:
        self.runner, self.max_running, self.step_tokens = runner, max_running, step_tokens
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="bough-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> Handle:
        if self._closed:
            raise RequestError("the engine is closed; load it again")
        self._inbox.put(sequence)
        return sequence.handle

    def close(self) -> None:
        """Cancel what is under way and end the thread. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            self._thread.join()

    def _work(self) -> None:
        while self._receive():
            self._drop_cancelled()
            self._admit()
            if self._running:
                self._step()
        for sequence in [*self._running, *self._waiting]:
            sequence.cut_off()
            sequence.finish("cancelled")

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
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting.popleft()
            sequence.state = State(self.runner.pool)
            self._running.append(sequence)

    def _step(self) -> None:
        """One forward over what is planned. Whatever goes wrong ends those requests, not the engine."""
        rows = plan(self._running, self.step_tokens)
        batch = [(_state(s), s.tokens[s.computed : s.computed + count]) for s, count in rows]
        wanted = [i for i, (s, count) in enumerate(rows) if count == s.pending and s.wants_token]
        try:
            hidden, logits = self.runner.forward(batch, wanted)
        except PoolFull as error:
            self._make_room(error)
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, its requests are told, and the others go on)
            self._fail([s for s, _ in rows], error)
            return
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
        """Memory ran out: the newest sequence gives its state back and starts over when there is room."""
        newest = self._running.pop()
        if self._running:
            newest.release()
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
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)


def _state(sequence: Sequence) -> State:
    assert sequence.state is not None
    return sequence.state
