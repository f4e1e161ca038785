"""The search for garbage: not through what stays.

Python looks through all there is for garbage, now and then, and everybody waits: 0.15 s and more if that is what
libraries make when they are imported, and half as long for what compilers leave behind. So what has been made by then
is left out of it while an engine is open. It is looked through once before: what is garbage already would stay.
"""

import gc
from weakref import WeakSet

_engines: WeakSet[object] = WeakSet()  # that are open


def opened(engine: object) -> None:
    """There is one more engine."""
    _engines.add(engine)
    leave_out()


def leave_out() -> None:
    """Look for garbage, and never again through what is none by now; unless nobody wants it to be looked for."""
    if gc.isenabled():
        gc.collect()
        gc.freeze()


def closed(engine: object) -> None:
    """An engine is closed. After the last one all is looked through again."""
    _engines.discard(engine)
    if not _engines:
        gc.unfreeze()
