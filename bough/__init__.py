"""Bough: a runtime for hybrid language models in which no token is computed twice that need not be."""

from bough.config import CacheConfig, SamplingParams
from bough.engine.engine import Engine
from bough.errors import BoughError

__all__ = ["BoughError", "CacheConfig", "Engine", "SamplingParams"]
__version__ = "0.1.0"
