"""A disk cache as files: what is in it for each model, read without a model, a lock or a change.

It may be in use meanwhile. The tree is put together as an engine would at its start, from what the files say.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bough.cache.disk import ABOUT, EXTENT, scan
from bough.cache.explain import Explanation, explain
from bough.cache.extent import Extent, connect
from bough.cache.ledger import Ledger
from bough.cache.tree import Copy, Node, Tier, Tree, Walk, as_symbols

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache

LARGEST_ABOUT = 1 << 20  # bytes


@dataclass(slots=True)
class Files:
    """What the disk has of an edge, to look at."""

    resumes: bool = False
    is_sound: bool = True
    freed_bytes: int = 0  # of the files that end with the edge; some may begin before it


class StoredModel:
    """What a folder holds for one model."""

    def __init__(self, folder: Path, extents: Sequence[Extent], unusable: int) -> None:
        self.identity, self.extents, self.unusable = folder.name, extents, unusable
        self.about = _about(folder / ABOUT)
        self.tree, self.ledger, self.clock = Tree(), Ledger(), time.time
        # The arrays that an extent with a resume point has; None: not known, so none is said to be there.
        needed = self.about.get("resume_point")
        self.needed = frozenset(map(str, needed)) if isinstance(needed, list) else None
        found, self.stranded = connect(extents)
        for extent, node in [(extent, self.tree.grow(extent.salt, path, 0.0)) for extent, path in found]:
            self._add(extent, node)

    def _add(self, extent: Extent, last: Node) -> None:
        """An extent ends with a node, whatever was split since, and passes those before it."""
        for node in last.path():
            node.used = max(node.used, extent.used)
            if node.copies[Tier.DISK] is None:
                self.tree.put(node, Tier.DISK, cast(Copy, Files(resumes=self.needed == frozenset())))
        files = cast(Files, last.copies[Tier.DISK])
        files.resumes |= self.needed is not None and self.needed <= extent.arrays.keys()
        files.freed_bytes += extent.nbytes

    def resume(self, walk: Walk, most: int) -> tuple[int, list[Node]]:
        """The largest length up to `most` that can be resumed at, and the path to it."""
        top = min(walk.matched, most)
        if self.needed == frozenset():
            return top, walk.nodes
        ends = [node.end for node in walk.nodes if node.end <= top and node.resumes]
        return max(ends, default=0), walk.nodes

    def explain(self, tokens: Sequence[int], salt: bytes) -> Explanation:
        """Why so much of a prompt would be computed. Evictions are not known here."""
        return explain(cast("PrefixCache", self), as_symbols(tokens), salt)  # it asks for nothing that is not here

    def describe(self, most: int) -> list[dict[str, Any]]:
        """The nodes, as an engine describes them."""
        rows: list[dict[str, Any]] = []
        for node in self.tree.walk():
            if len(rows) == most:
                break
            files = cast(Files, node.copies[Tier.DISK])
            rows.append(
                {"depth": len(node.path()), "start": node.start, "end": node.end}
                | {"tiers": {"disk": "resumes" if files.resumes else "passes"}, "bytes": files.freed_bytes}
                | {"uses": None, "used": node.used, "tokens": node.symbols[:16].tolist()}
                | {"salt": node.root().salt.hex()[:8]}
            )
        return rows

    def stats(self) -> dict[str, Any]:
        nodes = list(self.tree.walk())
        return {
            "files": len(self.extents),
            "bytes": sum(extent.nbytes for extent in self.extents),
            "nodes": len(nodes),
            "tokens": sum(len(node.symbols) for node in nodes),
            "resume_points": sum(node.resumes for node in nodes) if self.needed else None,
            "stranded_files": len(self.stranded),
            "unusable_files": self.unusable,
            "last_used": max((extent.used for extent in self.extents), default=None),
        }


def stored_models(folder: Path) -> list[StoredModel]:
    """What each model has in a folder. Raises DiskUnavailable if it cannot be read."""
    listed = {path for path in folder.glob("*/*") if EXTENT.fullmatch(path.name)}  # before: what comes later is new
    found: dict[str, list[Extent]] = defaultdict(list)
    for extent in scan(folder):
        found[extent.identity].append(extent)
    models = []
    for identity in sorted({path.parent.name for path in listed} | set(found)):
        names = {extent.name for extent in found[identity]}
        left = [path for path in listed if path.parent.name == identity and path.stem not in names]
        models.append(StoredModel(folder / identity, found[identity], sum(map(os.path.lexists, left))))
    return models


def _about(path: Path) -> dict[str, Any]:
    """What was written for people when the folder was made; nothing depends on it but what is shown."""
    try:
        with path.open("rb") as file:
            about = json.loads(file.read(LARGEST_ABOUT))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
