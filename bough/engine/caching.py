"""The prefix cache of an engine: how it is set up, and what users may ask it, from any thread."""

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.cache.disk import Disk
from bough.cache.explain import Explanation
from bough.cache.prefix_cache import PrefixCache
from bough.cache.shelf import Shelf
from bough.cache.tree import Tier
from bough.config import CacheConfig
from bough.engine.load import Loaded
from bough.engine.memory import available_bytes
from bough.errors import DiskUnavailable
from bough.models.identity import identity
from bough.state.pool import Pool

if TYPE_CHECKING:
    from bough.engine.engine import Engine, Prompt

MOST_DISK = 64 << 30


def prefix_cache(config: CacheConfig, loaded: Loaded, pool: Pool) -> PrefixCache:
    """The cache over a pool, with the tiers that are configured. A disk that cannot be used is done without."""
    on_gpu = pool.device.type == "cuda"
    host_bytes = config.host_bytes
    if host_bytes is None:
        host_bytes = available_bytes() // 4 if on_gpu else 0
    host = Pool(pool.layout, host_bytes, max_running=0, pinned=on_gpu) if config.enabled and host_bytes else None
    shelf = _shelf(config, loaded, pool) if config.enabled and config.disk_path is not None else None
    return PrefixCache(pool, host=host, shelf=shelf, policy=config.policy, enabled=config.enabled)


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
            describe={"model": loaded.name, "page_tokens": pool.layout.page_tokens, "dtype": str(loaded.model.dtype)},
        )
    except (DiskUnavailable, OSError) as error:
        warnings.warn(f"{error}; running without a disk cache", RuntimeWarning, stacklevel=4)
        return None
    return Shelf(disk, pool.layout)


class Cache:
    """What `engine.cache` answers."""

    def __init__(self, engine: "Engine", cache: PrefixCache) -> None:
        self._engine, self._cache = engine, cache

    def explain(self, prompt: "Prompt", cache_salt: str | None = None) -> Explanation:
        """How much of a prompt is known, from where it can be resumed, and why no more."""
        tokens = self._engine.tokens(prompt)
        return self._engine.call(lambda: self._cache.explain(tokens, cache_salt))

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
            depth = len(node.path())
            rows.append(
                {"depth": depth, "start": node.start, "end": node.end, "tiers": tiers, "uses": node.uses}
                | {"used": node.used, "tokens": node.symbols[:16].tolist(), "salt": node.root().salt.hex()[:8]}
            )
        return rows

    def flush(self) -> None:
        """Write to disk what is not there yet; waits for it."""
        self._engine.call(self._cache.tiers.flush)

    def clear(self) -> None:
        """Forget everything that no request is using, on every tier."""
        self._engine.call(self._cache.clear)
