"""Processes that die while they serve with a disk cache; run by test_tiers.py.

Every round forks: the child serves random requests on one folder, and is killed in some system call of the disk's
thread or at some moment. Then this process opens the folder, and every answer must still be right.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from timeline import LONGEST, Watched, agrees, audit, engine, expected, loaded, params, plain, room

from bough import Engine


def requests(dice: random.Random, most: int) -> list[tuple]:
    """Prompts of a few conversations, so that answers are known beforehand."""
    made = []
    for _ in range(most):
        talk = random.Random(dice.randrange(4))
        text = [talk.randrange(8, 50) for _ in range(LONGEST - 8)]
        made.append((text[: dice.choice([9, 16, 23, 31, 40, 63])], params(3, dice.choice([None, 1]))))
    return made


def opened(family: str, folder: str) -> Engine:
    device = int(2.5 * room(family, LONGEST, page_tokens=4, running=2, step=16))
    sizes = {"device_bytes": device, "disk_bytes": 60_000, "disk_write_rate": 1 << 40}
    return engine(family, running=2, step=16, disk_path=folder, **sizes)


def serve(family: str, folder: str, dice: random.Random) -> None:
    """Until it is killed, by itself or from outside."""
    left = dice.choice([10**9, *range(1, 40)])

    def mortal(call):
        def called(*args, **named):
            nonlocal left
            left -= 1
            if left == 0:
                if call is os_write:
                    os_write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return called

    os_write = os.write
    os.write, os.replace, os.unlink = mortal(os.write), mortal(os.replace), mortal(os.unlink)
    watched = Watched(opened(family, folder))
    while True:
        asked = requests(dice, dice.choice([1, 1, 3]))
        for (prompt, each), out in zip(asked, watched.ask(asked), strict=True):
            assert agrees(family, prompt, each, out)


def main(family: str, folder: str, rounds: int, seed: int) -> None:
    loaded(family)
    for talk in range(400):
        for prompt, each in requests(random.Random(talk), 1):
            expected(family, tuple(prompt), each)
    plain(family).close()  # no thread may be there when a process forks
    told: Counter[str] = Counter()
    for round_ in range(rounds):
        dice = random.Random(f"{seed} {round_}")
        child = os.fork()
        if not child:
            try:
                serve(family, folder, dice)
            finally:
                os._exit(1)  # only a kill is a good end
        time.sleep(dice.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "a child failed by itself"
        again = opened(family, folder)
        watched, asked = Watched(again), requests(dice, 6)
        for (prompt, each), out in zip(asked, watched.ask(asked), strict=True):
            assert agrees(family, prompt, each, out)
        told["hits"] += again.cache.stats().get("nodes_promoted_from_disk", 0)
        for name, count in again.cache.stats().items():
            if name.startswith(("extents_", "stranded", "disk_failures")):
                told[name] += count
        audit(again)
        again.close()
        told["rounds"] += 1
    print(json.dumps(told))


if __name__ == "__main__":
    tempfile.tempdir = str(Path(sys.argv[2]).parent)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
