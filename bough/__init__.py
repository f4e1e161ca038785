"""Bough: a runtime for hybrid language models in which no token is computed twice that need not be."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough.config import CacheConfig, Grammar, SamplingParams
    from bough.engine.engine import Engine
    from bough.errors import BoughError

__all__ = ["BoughError", "CacheConfig", "Engine", "Grammar", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is: torch takes a second, and the command line must hear Ctrl-C meanwhile."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"BoughError": "errors", "Engine": "engine.engine"}.get(name, "config")
    return getattr(import_module(f"bough.{home}"), name)
