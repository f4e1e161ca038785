"""Those that have yet to start, or to go on: in which order, and what each resumes from.

Only the loop's thread comes here.
"""

import itertools
from collections import deque
from collections.abc import Iterator

from bough.cache.prefix_cache import PrefixCache
from bough.cache.tree import common
from bough.engine.drafting import Drafting
from bough.engine.runner import Runner
from bough.engine.scheduler import order
from bough.engine.sequence import Sequence
from bough.state.live import State

WORTH_WAITING = 256  # tokens that another is about to read, or half of what there is to read
MOST_TRIES = 3  # to bring back what the cache has of a request, before it makes do with what is on the device


class Waiting:
    """The sequences that wait."""

    def __init__(self, runner: Runner, cache: PrefixCache, drafting: Drafting) -> None:
        self.runner, self.cache, self.drafting = runner, cache, drafting
        self._queue: deque[Sequence] = deque()
        self._preempted: set[Sequence] = set()  # those among them that had to give their memory back

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether nothing can start before a disk has answered."""
        return all(sequence.match is not None and not sequence.match.ready for sequence in self._queue)

    def append(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It had to give its memory back, and goes on when another has ended."""
        self._preempted.add(sequence)
        self.put_first(sequence)

    def put_first(self, sequence: Sequence) -> None:
        """It has run before, and lost its state."""
        self._queue.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._preempted.discard(sequence)
        self._queue.remove(sequence)

    def has_room(self) -> None:
        """Another has ended: whoever gave memory back may try again."""
        self._preempted.clear()

    def give_up_finds(self) -> bool:
        """Let go of what was found in the cache and not used yet. False: there is nothing."""
        found = [sequence for sequence in self._queue if sequence.match is not None]
        for sequence in found:
            self.release(sequence)
            self._preempted.add(sequence)
        return bool(found)

    def release(self, sequence: Sequence) -> None:
        if sequence.match is not None:
            self.cache.release(sequence.match)
            sequence.match = None

    def start(self, running: list[Sequence], most: int) -> list[tuple[Sequence, Exception]]:
        """Move sequences to those that run. One that had to give its memory back waits until another has ended.

        Those that wait for a disk, or for another's prefill of what they begin with, let others pass. Returns those
        that cannot start, and why.
        """
        failed = list[tuple[Sequence, Exception]]()
        for sequence in self._in_order(most - len(running)):
            if len(running) == most or (sequence in self._preempted and running):
                break
            try:
                resumable = self._is_resumable(sequence, running)
            except Exception as error:  # noqa: BLE001 (it is told, and others start)
                self.drafting.park(sequence)
                sequence.release()  # at once: another may start in its place
                failed.append((sequence, error))
                continue
            if resumable:
                for other in itertools.islice(self._queue, self._queue.index(sequence)):
                    other.passed += 1
                self.remove(sequence)
                running.append(sequence)
        return failed

    def _in_order(self, room: int) -> list[Sequence]:
        """As they came, unless they compete for room to run."""
        if not room or len(self._queue) <= room or not self.cache.enabled:
            return list(self._queue)
        preempted = [each for each in self._queue if each in self._preempted]
        others = [each for each in self._queue if each not in self._preempted]
        return preempted + order(others, lambda each: len(each.tokens) - self._resumable(each))

    def _is_resumable(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Give a waiting sequence the state that it goes on from, if that is there by now."""
        if sequence.request.score:  # every token's hidden row is wanted
            sequence.state = State(self.runner.pool)
            return True
        if sequence.match is None:
            if self._follows(sequence, running):
                return False
            everywhere = sequence.tries < MOST_TRIES
            sequence.match = self.cache.acquire(sequence.symbols, sequence.salt, everywhere=everywhere)
            sequence.tries += 1
        match = sequence.match
        if not match.ready:
            return False
        if not self.cache.is_here(match):
            self.release(sequence)
            return self._is_resumable(sequence, running)
        sequence.state = State(self.runner.pool)
        self.cache.restore(match, sequence.state)
        sequence.cuts = set(self.cache.points(match, sequence.request.boundaries, sequence.request.marks))
        sequence.match = None
        self.drafting.begin(sequence, match.resumable)
        if not sequence.started:
            sequence.started = True
            sequence.usage.matched_tokens, sequence.usage.cached_tokens = match.matched, match.resumable
            self.cache.count(match)
        return True

    def _resumable(self, sequence: Sequence) -> int:
        return self.cache.peek(sequence.request.prompt.symbols, sequence.salt)

    def _follows(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether to wait for a running prefill of the same beginning, which then leaves a resume point there."""
        if not self.cache.enabled:
            return False
        if sequence.leader is not None:
            other, at = sequence.leader
            if other in running and other.computed < at:
                return True
            sequence.leader = None
            return False  # it went as far as it would
        others = [other for other in running if other.pending > 1 and other.salt == sequence.salt]
        tokens, resumable = sequence.request.prompt.symbols, self._resumable(sequence) if others else 0
        for other in others:
            at = min(common(tokens, other.request.prompt.symbols), len(tokens) - 1)
            gain = at - resumable
            if other.computed < at and gain > 0 and gain >= min(WORTH_WAITING, (len(tokens) - resumable) // 2):
                other.cuts.add(at)
                sequence.leader = other, at
                return True
        return False
