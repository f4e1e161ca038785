"""PrefixCache: requests find here what was computed before them, and leave here what they computed.

`acquire` finds how much of a prompt is known and from where it can be resumed, pins that, and begins to bring it to the
device; `restore` puts a state there; `admit` lets the tree hold what a state has, running or ended. All of it is best
effort: where memory is short, serving goes on without.

Only the engine's thread calls in here. Knows tokens, states and snapshots; no model and no request.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from bough.cache.explain import Explanation, explain
from bough.cache.extent import salt_key
from bough.cache.ledger import Ledger
from bough.cache.points import place
from bough.cache.policy import Index
from bough.cache.reuse import Use
from bough.cache.shelf import Shelf
from bough.cache.tiers import Load, Tiers
from bough.cache.tree import Node, Symbols, Tier, Tree, Walk, as_symbols
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.snapshot import Snapshot
from bough.state.store import EMPTY


@dataclass(slots=True, eq=False)
class Match:
    """How much of a prompt is known, and from where it can be resumed. What it takes is pinned until it is released."""

    salt: bytes
    tokens: Symbols
    matched: int = 0  # tokens equal
    resumable: int = 0  # tokens whose work is saved
    pinned: Node | None = None
    loads: list[Load] = field(default_factory=list)  # what is on its way from disk

    @property
    def ready(self) -> bool:
        return all(load.done for load in self.loads)


class PrefixCache:
    """The tree over a device pool, and the tiers below it."""

    def __init__(
        self,
        pool: Pool,
        *,
        host: Pool | None = None,
        shelf: Shelf | None = None,
        policy: str = "value",
        enabled: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.pool, self.policy, self.enabled, self.clock = pool, policy, enabled, clock
        units = pool.layout.units
        self.has_points = any(not unit.is_page or unit.reach is not None for unit in units)
        self.point_tokens = _point_tokens(pool)
        self.ledger = Ledger()
        self.index = Index(policy, point_symbols=self.point_tokens if self.has_points else 0)
        self.tree = Tree(watcher=self.index)
        self.tiers = Tiers(self.tree, self.index, self.ledger, pool, host, shelf, clock=clock)

    # Finding.

    def acquire(self, tokens: Sequence[int] | Symbols, salt: str | None = None, *, everywhere: bool = True) -> Match:
        """What is known of a prompt, everywhere or on the device. At least its last token is left to compute."""
        match = Match(salt_key(salt), as_symbols(tokens))
        if not self.enabled:
            return match
        walk = self.tree.match(match.salt, match.tokens)
        match.matched = walk.matched
        for anywhere in (True, False) if everywhere else (False,):  # memory may be too short to bring it all back
            match.resumable, nodes = self.resume(walk, len(match.tokens) - 1, anywhere)
            if not nodes or self._bring(match, nodes):
                break
            self.release(match)
        return match

    def peek(self, tokens: Symbols, salt: str | None = None) -> int:
        """How much of a prompt could be resumed. Changes nothing."""
        return self.resume(self.tree.match(salt_key(salt), tokens), len(tokens) - 1)[0]

    def count(self, match: Match) -> None:
        """A request starts with what was found for it."""
        self.ledger.count("requests")
        self.ledger.count("prompt_tokens", len(match.tokens))
        self.ledger.count("matched_tokens", match.matched)
        self.ledger.count("cached_tokens", match.resumable)
        most = min(match.matched, len(match.tokens) - 1)
        self.ledger.count("matched_tokens_without_resume_point", most - match.resumable)
        if most < len(match.tokens) - 1 and (lost := self.ledger.find(match.salt, match.tokens, most, "node")):
            self.ledger.count("evicted_tokens_asked_for", min(lost.length, len(match.tokens) - 1) - most)

    def resume(self, walk: Walk, most: int, everywhere: bool = True) -> tuple[int, list[Node]]:
        """The largest length up to `most` that can be resumed at, and the path to it. Changes nothing."""
        nodes: list[Node] = []
        for node in walk.nodes:
            if node.copies[Tier.DEVICE] is None and not (everywhere and any(c and c.is_sound for c in node.copies)):
                break
            nodes.append(node)
        top = min(walk.matched, most, nodes[-1].end if nodes else 0)
        if not self.has_points or self._covers(nodes, top):
            return (top, [node for node in nodes if node.start < top]) if top else (0, [])
        while nodes:
            here = nodes[-1].resumes if everywhere else _resumes(nodes[-1].copies[Tier.DEVICE])
            if nodes[-1].end <= top and here:
                return nodes[-1].end, nodes
            nodes.pop()
        return 0, []

    def _covers(self, nodes: list[Node], length: int) -> bool:
        """Whether the windows before a length are on the device, wherever edges end; with slots only ends will do."""
        path = [copy for node in nodes if isinstance(copy := node.copies[Tier.DEVICE], Snapshot)]
        if self.pool.slot_store is not None or len(path) < len(nodes):
            return False
        for index in self.pool.page_stores:
            sources = [(each.runs.get(index, EMPTY), each.end) for each in path]
            if self.pool.assembled(sources, self.pool.layout.units[index].earliest(length), length) is None:
                return False
        return True

    def _bring(self, match: Match, nodes: list[Node]) -> bool:
        """Pin a path and bring what is elsewhere to the device. False: there is no room, or a copy has gone bad."""
        last = nodes[-1]
        if last.end > match.resumable and last.copies[Tier.DEVICE] is None:
            last = nodes[-1] = self.tree.split(last, match.resumable)  # only this part is wanted
        self.tree.pin(last)
        match.pinned = last
        for node in nodes:
            at_end = node is last and node.end == match.resumable and self.has_points
            found = self.tiers.promote(node, point=at_end)
            if not found:
                return False
            if isinstance(found, Load):
                match.loads.append(found)
        return True

    def is_here(self, match: Match) -> bool:
        """Whether all that it takes is on the device by now. What could not be read is not, nor what waited for it."""
        if not match.loads and (match.pinned is not None or not match.resumable):
            return True  # it was when it was found
        walk = self.tree.match(match.salt, match.tokens)
        return match.ready and self.resume(walk, match.resumable, everywhere=False)[0] == match.resumable

    def release(self, match: Match) -> None:
        """What was pinned may go. A second call does nothing."""
        if match.pinned is not None:
            self.tree.unpin(match.pinned)
        match.pinned, match.loads = None, []

    def restore(self, match: Match, state: State) -> None:
        """Put a fresh state where the match can be resumed, and release it."""
        if match.resumable:
            walk = self.tree.match(match.salt, match.tokens)
            path = _on_device(walk)
            state.restore(path, match.resumable, min(walk.matched, path[-1].end))
            if self.has_points and not any(each.end == match.resumable and each.resumes for each in path):
                # A window may be there where no point was: it is soon gone, unless there is one now.
                self._keep(state, match.salt, match.tokens[: match.resumable])
        self.release(match)

    def points(self, match: Match, boundaries: Sequence[int], marks: Sequence[int] = ()) -> list[int]:
        """The lengths at which the prefill of a prompt shall leave resume points."""
        if not self.enabled or not self.has_points:
            return []
        return place(
            len(match.tokens),
            resumable=match.resumable,
            matched=match.matched,
            boundaries=boundaries,
            marks=marks,
            point_tokens=self.point_tokens,
        )

    # Keeping.

    def admit(self, state: State, tokens: Sequence[int] | Symbols, salt: str | None = None, *, ended: bool) -> None:
        """Let the tree hold what a state has: all of it once it has ended, else what can be resumed at."""
        if not self.enabled or state.condition != "ready":
            return
        marks = sorted(state.points)
        end = state.length if ended or not self.has_points else max(marks, default=0)
        if ended and self.pool.slot_store is not None and self.pool.spare_slots < 1:
            self.make_points_room(1)
        symbols, key = as_symbols(tokens[:end]), salt_key(salt)
        for at in sorted({*marks, end} - {0}):
            if at <= end:
                self._keep(state, key, symbols[:at])
        for at in marks:
            state.forget(at)
        if not ended and end:
            state.adopt(_on_device(self.tree.match(key, symbols)))  # two that computed the same keep it once

    def _keep(self, state: State, salt: bytes, symbols: Symbols) -> None:
        state.settle()  # or there may be no memory for it when the tree has grown by a node that is to hold something
        node = self.tree.grow(salt, symbols, self.clock())
        for each in node.path():
            have = each.copies[Tier.DEVICE]
            if have is None or (each is node and not have.resumes):
                snapshot = state.snapshot(each.start, each.end)
                assert snapshot is not None
                self.tiers.give(each, Tier.DEVICE, snapshot)
                self.tiers.note(each)

    def used(self, prompt: Symbols, salt: str | None, resumed: int) -> Use:
        """A prompt was read, from `resumed` on: what its path is worth is judged by when it was last wanted."""
        key = salt_key(salt)
        return self.index.used(self.tree.match(key, prompt).nodes, self.clock(), prompt, salt=key, resumed=resumed)

    def finished(self, use: Use, tokens: Symbols, written: int, salt: str | None) -> None:
        """The reply to it has so many tokens; all of its text is this."""
        path = self.tree.match(salt_key(salt), tokens).nodes
        self.index.finished(use, written, path, self.clock())

    # Room.

    def make_room(self, needs: list[int]) -> bool:
        """Evict until a forward can have these entries. False: that is not enough, and nothing went.

        What went may have been shared with who asks: then he need not copy it, and asks for less.
        """
        before = self.tiers.evicted
        return self.tiers.make_room(needs) or self.tiers.evicted > before

    def make_points_room(self, count: int) -> None:
        """Evict what is worth least for so many resume points, as far as that goes."""
        if count and self.pool.slot_store is not None and self.enabled:
            needs = [0] * len(self.pool.stores)
            needs[self.pool.slot_store] = count
            for wanted in (count,) if self.pool.fits(needs, spare=True) else range(1, count + 1):
                needs[self.pool.slot_store] = wanted
                if not self.tiers.make_room(needs, spare=True):
                    return

    # Looking.

    def explain(self, tokens: Sequence[int], salt: str | None = None) -> Explanation:
        """Why so much of a prompt would be computed, and no more. Changes nothing."""
        return explain(self, as_symbols(tokens), salt_key(salt))

    def clear(self) -> None:
        """Forget everything that nobody is about to use, on every tier."""
        for node in reversed(list(self.tree.walk())):
            if not node.pins and not node.children:
                self.tiers.remove(node, Tier.DEVICE)

    def close(self) -> None:
        """Write what is not on disk yet, and let go of the folder."""
        if self.tiers.shelf is not None:
            self.tiers.flush()
            self.tiers.shelf.disk.close()

    def abandon(self) -> None:
        """Let go of the folder without writing anything more."""
        if self.tiers.shelf is not None:
            self.tiers.shelf.disk.close(abandon=True)

    def check(self) -> None:
        self.pool.check()
        self.tiers.check()


def _on_device(walk: Walk) -> list[Snapshot]:
    """What the device has of a path, from its beginning on."""
    copies = (node.copies[Tier.DEVICE] for node in walk.nodes)
    return [each for each in takewhile(lambda copy: copy is not None, copies) if isinstance(each, Snapshot)]


def _resumes(copy: object) -> bool:
    return isinstance(copy, Snapshot) and copy.resumes


def _point_tokens(pool: Pool) -> int:
    """What a resume point weighs, in tokens of K and V."""
    size, point, token = pool.layout.page_tokens, 0, 0.0
    for unit in pool.layout.units:
        if not unit.is_page:
            point += unit.stride
        elif unit.reach is None:
            token += unit.stride / size
        else:
            point += -(-unit.reach // size) * unit.stride
    return round(point / token) if token else 1
