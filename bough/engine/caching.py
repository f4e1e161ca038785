"""The prefix cache of an engine: how it is set up, and what users may ask it, from any thread."""

import shutil
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.cache.disk import Disk
from bough.cache.explain import Explanation, Loss
from bough.cache.extent import salt_key
from bough.cache.prefix_cache import PrefixCache
from bough.cache.shelf import Shelf
from bough.cache.tree import Node, Tier, Tree, as_symbols
from bough.config import CacheConfig
from bough.engine.load import Loaded
from bough.engine.memory import IDLE, available_bytes
from bough.errors import DiskUnavailable, PoolFull
from bough.models.identity import identity
from bough.state.layout import Layout
from bough.state.pool import Pool

if TYPE_CHECKING:
    from bough.engine.engine import Engine, Prompt

MOST_DISK, MOST_HOST = 64 << 30, 16 << 30
LOOK_AHEAD = 1024  # tokens that are compared as text to explain a miss


def prefix_cache(config: CacheConfig, loaded: Loaded, pool: Pool) -> PrefixCache:
    """The cache over a pool, with the tiers that are configured. A disk that cannot be used is done without."""
    on_gpu = pool.device.type == "cuda"
    host_bytes = config.host_bytes
    if host_bytes is None:
        host_bytes = min(available_bytes() // 4, IDLE * pool.nbytes, MOST_HOST) if on_gpu else 0
    host = _host(pool, host_bytes) if config.enabled and host_bytes else None
    shelf = _shelf(config, loaded, pool) if config.enabled and config.disk_path is not None else None
    return PrefixCache(pool, host=host, shelf=shelf, policy=config.policy, enabled=config.enabled)


def _host(pool: Pool, nbytes: int) -> Pool:
    try:
        return Pool(pool.layout, nbytes, max_running=0, pinned=pool.device.type == "cuda")
    except PoolFull:
        raise PoolFull(
            f"host_bytes {nbytes:,} is too little for a page of each kind; give more, or 0 for no host tier"
        ) from None


def draft_cache(prefixes: PrefixCache, pool: Pool | None) -> PrefixCache | None:
    """The cache of a drafter's states, which lie in the arena of the target's; they are not kept on disk."""
    if pool is None:
        return None
    host = prefixes.tiers.host
    beside = Pool(pool.layout, max_running=0, beside=host) if host is not None else None
    cache = PrefixCache(pool, host=beside, policy=prefixes.policy, enabled=prefixes.enabled)
    cache.tiers.neighbour, prefixes.tiers.neighbour = prefixes.tiers, cache.tiers
    cache.tiers.lane = prefixes.tiers.lane  # what leaves either pool may make room in the other
    return cache


def _shelf(config: CacheConfig, loaded: Loaded, pool: Pool) -> Shelf | None:
    assert config.disk_path is not None
    folder = Path(config.disk_path).expanduser()
    nbytes = config.disk_bytes
    try:
        if nbytes is None:
            folder.mkdir(parents=True, exist_ok=True)
            nbytes = min(MOST_DISK, shutil.disk_usage(folder).free // 2)
        disk = Disk.open(
            folder,
            nbytes,
            identity=identity(loaded.model, pool.layout),
            write_rate=config.disk_write_rate,
            describe=_about(loaded, pool.layout),
        )
    except (DiskUnavailable, OSError) as error:
        warnings.warn(f"{error}; running without a disk cache", RuntimeWarning, stacklevel=4)
        return None
    return Shelf(disk, pool.layout)


def _about(loaded: Loaded, layout: Layout) -> dict[str, Any]:
    """What people want to know of a folder, and whoever reads it without the model."""
    units = [f"unit{i}" for i, unit in enumerate(layout.units) if not unit.is_page or unit.reach is not None]
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return {"model": loaded.name, "dtype": dtype, "page_tokens": layout.page_tokens, "resume_point": units}


class Cache:
    """What `engine.cache` answers."""

    def __init__(self, engine: "Engine", cache: PrefixCache) -> None:
        self._engine, self._cache = engine, cache

    @property
    def enabled(self) -> bool:
        """Whether anything is kept from one request for another."""
        return self._cache.enabled

    @property
    def places_points(self) -> bool:
        """Whether prefills leave resume points, so that it is of use to name the boundaries of a prompt."""
        return self._cache.enabled and self._cache.has_points

    def explain(self, prompt: "Prompt", cache_salt: str | None = None) -> Explanation:
        """How much of a prompt is known, from where it can be resumed, and why no more."""
        tokens = self._engine.tokens(prompt)
        return self._engine.call(lambda: self._explain(tokens, cache_salt))

    def _explain(self, tokens: Sequence[int], salt: str | None) -> Explanation:
        told, tokenizer = self._cache.explain(tokens, salt), self._engine.tokenizer
        if tokenizer is None:
            return told
        return with_retokenised(told, self._cache.tree, salt_key(salt), tokens, tokenizer.token_bytes)

    def stats(self) -> dict[str, Any]:
        """Counters, and the bytes that each tier holds of what it may."""
        return self._engine.call(self._stats)

    def _stats(self) -> dict[str, Any]:
        tiers = self._cache.tiers
        bytes_of = {"device": (tiers.device.used_bytes, tiers.device.nbytes)}
        if tiers.host is not None:
            bytes_of["host"] = (tiers.host.used_bytes, tiers.host.nbytes)
        stats: dict[str, Any] = {"nodes": self._cache.tree.size, **self._cache.ledger.counters}
        if tiers.shelf is not None:
            disk = tiers.shelf.disk
            bytes_of["disk"] = (disk.used_bytes, disk.nbytes)
            stats |= {f"extents_dropped_{why}": count for why, count in disk.dropped.items()}
            stats |= {f"disk_failures_{what}": count for what, count in disk.failures.items()}
        return stats | {"bytes": {name: {"used": used, "of": most} for name, (used, most) in bytes_of.items()}}

    def describe(self, most: int = 1000) -> list[dict[str, Any]]:
        """The nodes of the tree, parents before children, at most so many."""
        return self._engine.call(lambda: self._describe(most))

    def _describe(self, most: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for node in self._cache.tree.walk():
            if len(rows) == most:
                break
            tiers = {
                tier.name.lower(): "resumes" if copy.resumes else "passes"
                for tier, copy in zip(Tier, node.copies, strict=True)
                if copy is not None
            }
            nbytes = sum(copy.freed_bytes for copy in node.copies if copy is not None)
            depth = len(node.path())
            rows.append(
                {"depth": depth, "start": node.start, "end": node.end, "tiers": tiers, "bytes": nbytes}
                | {"uses": node.uses, "used": node.used, "tokens": node.symbols[:16].tolist()}
                | {"salt": node.root().salt.hex()[:8]}
            )
        return rows

    def flush(self) -> None:
        """Write to disk what is not there yet; waits for it."""
        self._engine.call(self._cache.tiers.flush)

    def clear(self) -> None:
        """Forget everything that no request is using, on every tier; what drafters have learnt too."""
        self._engine.call(self._clear)

    def _clear(self) -> None:
        self._cache.clear()
        self._engine.drafting.clear()


Spell = Callable[[int], bytes]  # what a token adds to a text


def with_retokenised(told: Explanation, tree: Tree, salt: bytes, tokens: Sequence[int], spell: Spell) -> Explanation:
    """An explanation that tells what was never seen from what was, but in other tokens of the same text."""
    losses = list(told.losses)
    place = next((i for i, loss in enumerate(losses) if loss.reason == "never seen"), None)
    walk = tree.match(salt, as_symbols(tokens))
    node = walk.nodes[-1] if walk.nodes else tree.roots.get(salt)
    if place is None or node is None:
        return told
    loss = losses[place]
    same = _same_text(node, loss.start, tokens[loss.start : loss.start + LOOK_AHEAD], spell)
    if not same:
        return told
    border = min(loss.end, loss.start + same)
    detail = "the text is known, in other tokens; give the ids that were generated (a chat does), not their text"
    losses[place : place + 1] = [Loss(loss.start, border, "retokenised", detail)]
    if border < loss.end:
        losses.insert(place + 1, replace(loss, start=border))
    return replace(told, losses=losses)


def _same_text(node: Node, after: int, tokens: Sequence[int], spell: Spell) -> int:
    """How many of these tokens spell what some path from `after` on spells too, the last one perhaps in part.

    They do up to where both have a token's end, or one of them ends altogether.
    """
    pieces = [spell(token) for token in tokens]
    text, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    most, left = 0, 4 * LOOK_AHEAD
    stack = [(node, after, 0)]
    while stack and left > 0:
        node, after, at = stack.pop()
        for symbol in node.symbols[after - node.start :]:
            left -= 1
            piece = spell(int(symbol))
            wanted = text[at : at + len(piece)]
            if not wanted or not piece.startswith(wanted):
                break
            at += len(wanted)
            count = bisect_right(ends, at)
            if count and ends[count - 1] == at:  # so it is at the end of the text
                most = max(most, count)
        else:
            stack += [(child, child.start, at) for child in node.children.values()]
            if not node.children and at:
                most = max(most, bisect_right(ends, at - 1) + 1)
    return most
