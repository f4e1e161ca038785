"""Works on stores in forked processes, which may be killed meanwhile: a line of JSON [what, home, where, at] for each.

A process ends itself, without a word to anyone, at the at-th of the moments that tests may choose from: before and
after every change that it makes to the file system through the functions listed here, and wherever it tells of its
progress. What it wrote outlives it without fsync. Answers with a line of JSON: [exit code, how many moments].
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, get_session, hf_hub_url, utils

from bough.models.config import ModelConfig
from bough.models.load import family_of
from bough.store.create import create
from bough.store.modelfile import read_modelfile
from bough.store.names import Name
from bough.store.pull import HubId, pull
from bough.store.store import Store

LATE = (HfApi, errors, get_session, hf_hub_url, utils)  # modules that huggingface_hub imports when they are named
CHANGES = [(os, "link"), (os, "rename"), (os, "replace"), (os, "unlink"), (shutil, "rmtree")]


class Moments:
    """Counts moments, and ends the process at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def pass_one(self, *_: object) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **kwargs: Any) -> Any:
            self.pass_one()
            result = do(*args, **kwargs)
            self.pass_one()
            return result

        return done


def work(what: str, home: str, where: str, at: int) -> int:
    moments, name, store = Moments(at), Name.parse("made"), Store(Path(home) / "models")
    for module, function in CHANGES:
        setattr(module, function, moments.around(getattr(module, function)))
    os.fsync = moments.pass_one
    if what in ("create", "quantise"):
        scheme = "int8" if what == "quantise" else None
        create(store, name, read_modelfile(Path(where)), scheme=scheme, tell=moments.pass_one)
    elif what == "pull":
        os.environ["HF_ENDPOINT"] = where
        pull(store, HubId.parse("org/tiny"), name=name, tell=moments.pass_one)
    else:
        store.remove(name)
    return moments.count


def main() -> None:
    family_of(ModelConfig({"model_type": "llama"}))  # what is imported late is so here, once: who is forked has it
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, str(work(*json.loads(line))).encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        count = os.read(reading, 100)
        os.close(reading)
        print(json.dumps([os.waitstatus_to_exitcode(status), int(count or 0)]), flush=True)


if __name__ == "__main__":
    main()
