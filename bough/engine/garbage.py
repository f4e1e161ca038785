"""The search for garbage: not through what stays, and not while anybody writes if it can wait.

Python looks through all there is for garbage, now and then, and everybody waits: 0.15 s and more if that is what
libraries make when they are imported, and half as long for what compilers leave behind. What has been made by then and
stays is left out of it; an engine that has nothing to do looks for the rest, before it would be looked for in a step.
"""

import gc


def leave_out() -> None:
    """Look for garbage, and never again through what is none by now."""
    gc.collect()
    gc.freeze()


def look() -> None:
    """Look for garbage among all that was not left out."""
    gc.collect()


def leave_nothing_out() -> None:
    gc.unfreeze()
