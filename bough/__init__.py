"""Bough: a runtime for hybrid language models in which no token is computed twice that need not be."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough.config import CacheConfig, SamplingParams
    from bough.engine.engine import Engine
    from bough.errors import BoughError

__all__ = ["BoughError", "CacheConfig", "Engine", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is: torch takes a second, and the command line must hear Ctrl-C meanwhile."""
    from importlib import import_module

    homes = {"BoughError": "errors", "CacheConfig": "config", "Engine": "engine.engine", "SamplingParams": "config"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bough.{homes[name]}"), name)
