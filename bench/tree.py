"""What the tree costs: matching, admitting and evicting at 10³ to 10⁶ nodes, and the bytes of objects a node takes.

    python bench/tree.py                    # all sizes; the largest takes a while
    python bench/tree.py --nodes 1e3,1e4    # some
    python bench/tree.py --policy lru --append

The tree is one of conversations: shared openings that branch into turns. One JSON line for each size; microseconds are
medians over prompts of 64 symbols, so a flat column means that the cost depends on the prompt alone. An admission is
of eight nodes, each with a resume point. Each size has a process of its own, whose memory tells the bytes.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

from bough.cache.policy import Index, Move
from bough.cache.tree import Node, Tier, Tree

OUT = Path(__file__).parent / "results" / "tree.jsonl"
PROMPT, EDGE = 64, 8  # symbols
TRIES = 300


class Held:
    """A copy that holds nothing."""

    __slots__ = ("resumes",)
    is_sound, freed_bytes = True, 1

    def __init__(self, resumes: bool) -> None:
        self.resumes = resumes

    def split(self, at: int) -> "tuple[Held, Held]":
        return Held(False), self

    def close(self) -> None:
        pass


def prompt(dice: Random) -> list[int]:
    """Eight turns of eight symbols: the first few from few choices, so that conversations begin alike."""
    return [dice.randrange(4 if at < EDGE else 1 << 30) for at in range(PROMPT)]


def admit(tree: Tree, index: Index, symbols: list[int], now: float) -> None:
    for at in range(EDGE, PROMPT + 1, EDGE):
        node = tree.grow(b"", symbols[:at], now)
        for each in node.path():
            if each.copies[Tier.DEVICE] is None:
                tree.put(each, Tier.DEVICE, Held(True))
    nodes = tree.match(b"", symbols).nodes
    index.finished(index.used(nodes, now, nodes[-1].symbols), 10)


def evict(tree: Tree, index: Index, now: float) -> None:
    found = index.least(Tier.DEVICE, now, lambda node, move: True)
    assert found is not None
    node, move = found
    if move is Move.POINT:
        tree.put(node, Tier.DEVICE, Held(False))
    else:
        remove(tree, node)


def remove(tree: Tree, node: Node) -> None:
    tree.put(node, Tier.DEVICE, None)
    tree.remove(node)


def microseconds(work) -> float:
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return round(1e6 * median(taken), 1)


def resident() -> int:
    """Bytes that the process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(nodes: int, policy: str) -> dict:
    dice, index = Random(1), Index(policy, point_symbols=400)
    tree = Tree(watcher=index)
    before, now, kept = resident(), 0.0, []
    while tree.size < nodes:
        now += 1.0
        symbols = prompt(dice)
        admit(tree, index, symbols, now)
        if len(kept) < TRIES:
            kept.append(symbols)
    nbytes = (resident() - before) / tree.size
    known = iter(kept * TRIES)
    return {
        "bench": "tree",
        "nodes": tree.size,
        "policy": policy,
        "match_us": microseconds(lambda: tree.match(b"", next(known))),
        "miss_us": microseconds(lambda: tree.match(b"", prompt(dice))),
        "admit_us": microseconds(lambda: admit(tree, index, prompt(dice), now)),
        "evict_us": microseconds(lambda: evict(tree, index, now)),
        "bytes_per_node": round(nbytes),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1e3,1e4,1e5,1e6")
    parser.add_argument("--policy", default="value", choices=("value", "lru"))
    parser.add_argument("--append", action="store_true", help="keep the lines that are in the results file")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    with asked.out.open("a" if asked.append else "w") as file:
        for size in asked.nodes.split(","):
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                line = json.dumps(alone.apply(measure, (int(float(size)), asked.policy)))
            print(line, file=sys.stderr)
            print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
