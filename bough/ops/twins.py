"""Which twin of an op runs: on a CUDA device that of Triton, where it is installed; else the readable one."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def twins(tensor: Tensor) -> ModuleType | None:
    """The faster twins for whatever lies where this tensor does; in float64 there are none to be faster than."""
    return _triton() if tensor.is_cuda and tensor.dtype != torch.float64 else None


@cache
def _triton() -> ModuleType | None:
    return import_module("bough.ops.triton") if find_spec("triton") is not None else None
