"""What a cache that knows the future would reach on a trace: a bound to hold policies against.

All prompts of the trace make one tree; a request touches whole edges of it. Without resume points, giving up what is
used again last (Belady) is optimal: tokens weigh the same, and a parent is never used later than a child. An edge may
be held in part. With resume points the best is hard to find; this one is feasible, so a lower bound of it: a point is
kept only where a later request will leave the path, and edges and points go in order of their next use.
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from trace_files import Recorded, Trace

from bough.cache.tree import Node, Tree

NEVER = 1 << 60


@dataclass(slots=True)
class Item:
    """An edge of the tree of all prompts, or a resume point at the end of one."""

    size: int
    depth: int
    is_point: bool = False
    uses: list[int] = field(default_factory=list)  # numbers of requests, rising
    held: int = 0
    due: int = NEVER  # its next use


class Optimum:
    """A trace seen as a whole, for models whose resume points take so many tokens' memory."""

    def __init__(self, trace: Trace, point: int) -> None:
        self.trace, self.point = trace, point
        tree = Tree()
        paths = [self._path(request) for request in trace.requests]
        for path in paths:
            if len(path):
                tree.grow(b"", path, 0.0)
        self.routes: list[list[Item]] = []
        self._items: dict[Node, Item] = {}
        self._points: dict[Node, Item] = {}
        tokens = self._tokens(tree, paths)
        for number, path in enumerate(paths):
            nodes = tree.match(b"", path).nodes
            items = [self._items.setdefault(n, Item(tokens[n], depth)) for depth, n in enumerate(nodes)]
            known = [n for n, item in zip(nodes, items, strict=True) if item.uses]
            if known and point:
                end = self._points.setdefault(known[-1], Item(point, len(known) - 1, is_point=True))
                end.uses.append(number)
            for item in items:
                item.uses.append(number)
            self.routes.append(items)
        self._below = [[self._points.get(node) for node in tree.match(b"", path).nodes] for path in paths]

    def _path(self, request: Recorded) -> np.ndarray:
        return request.prompt[: request.whole] if self.point else request.prompt

    def _tokens(self, tree: Tree, paths: list[np.ndarray]) -> dict[Node, int]:
        sizes: dict[Node, int] = {}
        for request, path in zip(self.trace.requests, paths, strict=True):
            for node in tree.match(b"", path).nodes:
                if node not in sizes:
                    sizes[node] = int(request.tokens[node.start : node.end].sum())
        return sizes

    @property
    def unique_tokens(self) -> int:
        return sum(item.size for item in self._items.values())

    def run(self, budget: int) -> float:
        """The share of prompt tokens that need not be computed."""
        heap: list[tuple[int, int, int, int, Item]] = []
        used = hit = order = 0
        for item in (*self._items.values(), *self._points.values()):
            item.held, item.due = 0, NEVER
        for number, (route, points) in enumerate(zip(self.routes, self._below, strict=True)):
            resumed, depth = self._hit(route, points)
            hit += resumed
            for item in (*route, *(p for p in points if p is not None)):
                at = bisect_right(item.uses, number)
                if at == len(item.uses):
                    used -= item.held
                    item.held = 0
                elif item.held or not item.is_point or item.depth > depth:  # else it was not passed by computing
                    used += item.size - item.held
                    item.held, item.due = item.size, item.uses[at]
                    order += 1
                    heapq.heappush(heap, (-item.due, -item.is_point, -item.depth, order, item))
            while used > budget:
                due, _, _, _, item = heapq.heappop(heap)
                if item.held and item.due == -due:
                    gone = item.held if item.is_point else min(item.held, used - budget)
                    item.held -= gone
                    used -= gone
                    if item.held:
                        heapq.heappush(heap, (due, 0, -item.depth, order, item))
                        break
        return hit / self.trace.prompt_tokens

    def _hit(self, route: list[Item], points: list[Item | None]) -> tuple[int, int]:
        """Tokens that need not be computed, and the last node of the path that these are all of."""
        reached, resumed, last = 0, 0, -1
        for depth, (item, point) in enumerate(zip(route, points, strict=True)):
            reached += item.held
            if not self.point or (item.held == item.size and point is not None and point.held):
                resumed, last = reached, depth
            if item.held < item.size:
                break
        return resumed, last
