"""The search for garbage: not through what stays.

Python looks through all there is for garbage, now and then, and everybody waits: 0.15 s and more if that is what
libraries make when they are imported, and half as long for what compilers leave behind. So what has been made by then
is left out of it while an engine is open. It is looked through once before: what is garbage already would stay.

So would an engine that is closed, with its model and its memory. So when one is closed all is looked through again, and
nothing is left out before nobody refers to it any more.
"""

import gc
from weakref import WeakSet

_engines: WeakSet[object] = WeakSet()  # that are open
_closed: WeakSet[object] = WeakSet()  # and those that somebody still refers to


def opened(engine: object) -> None:
    """There is one more engine."""
    _engines.add(engine)
    leave_out()


def leave_out() -> None:
    """Look for garbage, and never again through what is none by now; unless nobody wants it to be looked for."""
    if gc.isenabled():
        gc.collect()
        if not _closed:
            gc.freeze()


def closed(engine: object) -> None:
    """An engine is closed. All is looked through again."""
    if engine in _engines:
        _engines.discard(engine)
        _closed.add(engine)
        gc.unfreeze()
