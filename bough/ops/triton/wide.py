"""Products of some hundred rows on Hopper's matrix units (wide.cu).

In CUDA C++, since Triton has no tiles but of powers of two, and no copies that several processors share.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from bough.ops.activation import Activation
from bough.ops.spans import processors
from bough.ops.triton.activation import ACTIVATIONS
from bough.ops.triton.native import Box, Kernel, able, kernel, map_of, with_defined
from bough.ops.triton.plan import shared_bytes
from bough.ops.triton.spare import with_spare

TILE, SPAN = 64, 64  # rows that the units multiply at a time, and inputs that are copied at a time
CLUSTER = 2  # blocks that share copies: of more, not as many find room on a H200's processors
TILES = range(3, 6)  # of rows, that it is faster for than the library
LEAST, MOST = 128, 144  # products of a block: with fewer, rows come too often for each; of more, registers hold no sums
OWN = 2048  # bytes of shared memory that are not for what is copied
CODE = {
    "silu": "__fdividef(x, 1.0f + __expf(-x))",
    "sigmoid": "__fdividef(1.0f, 1.0f + __expf(-x))",
    "gelu_tanh": "__fdividef(x, 1.0f + __expf(-1.5957691216f * (x + 0.044715f * x * x * x)))",
}


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    tiles: int  # of rows
    products: int  # of a block of threads, gates included
    stages: int
    activation: str

    @property
    def stage_bytes(self) -> int:
        return (self.tiles * TILE + self.products) * SPAN * 2

    @property
    def groups(self) -> int:
        """Of four warps that multiply."""
        return 3 if self.tiles % 2 else 2

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def source(self) -> str:
        sums, each = self.products // 2, cdiv(self.tiles, self.groups)
        last = self.tiles - each * (self.groups - 1)
        return with_defined(["wide.cu"], {
            "TILES": self.tiles, "GROUPS": self.groups, "WIDTH": self.products, "STAGES": self.stages,
            "CLUSTER": CLUSTER, "SPAN": SPAN, "ACTIVATED(x)": f"({CODE[self.activation]})",
            "ENTRY": 65536 // self.threads // 8 * 8, "WHOLE": _registers(each * sums), "LAST": _registers(last * sums),
            "LEFT": f'"{sums}"', "RIGHT": f'"{sums + 1}"',
            "SUMS": '"' + ",".join(f"%{i}" for i in range(sums)) + '"',
            "SUMMED(x)": ",".join(f'"+f"(x[{i}])' for i in range(sums)),
        })  # fmt: skip


def _registers(sums: int) -> int:
    """Of a thread with so many sums."""
    return cdiv(sums + 40, 8) * 8


@cache
def cut(rows: int, products: int, processors: int, room: int, activation: str) -> Shape | None:
    """So many products to a block that each processor has one; None: the library has better cuts."""
    tiles, each = cdiv(rows, TILE), cdiv(cdiv(products, processors // CLUSTER * CLUSTER), 16) * 16
    shape = Shape(tiles, each, 0, activation)
    stages = (room - OWN) // shape.stage_bytes
    return shape._replace(stages=stages) if tiles in TILES and LEAST <= each <= MOST and stages >= 2 else None


def wide(x: Tensor, gate_up: Tensor, activation: Activation) -> Tensor | None:
    """The twin of ops.gated_linear, where it is faster than torch's own; None elsewhere."""
    (products, inputs), alike = gate_up.shape, x.dtype == gate_up.dtype == torch.bfloat16
    laid_out = (
        x.stride(1) == 1 and x.stride(0) % 8 == 0 and gate_up.is_contiguous() and inputs % 8 == products % 16 == 0
    )
    aligned = x.data_ptr() % 16 == gate_up.data_ptr() % 16 == 0
    if not (alike and laid_out and aligned and activation in ACTIVATIONS and able(x.device)):
        return None
    shape = cut(len(x), products, processors(x.device), shared_bytes(x.device), ACTIVATIONS[activation])
    made = None if shape is None else _kernel(shape, x.device)
    return None if shape is None or made is None else _launched(x, gate_up, shape, made)


def _launched(x: Tensor, gate_up: Tensor, shape: Shape, made: Kernel) -> Tensor | None:
    outputs = len(gate_up) // 2
    maps = _map(x, shape.tiles * TILE // CLUSTER), _map(gate_up, shape.products // 2)
    if None in maps:
        return None
    out = with_spare(x, (len(x), outputs))
    numbers = map(ctypes.c_int, (len(x), x.shape[1], outputs))
    blocks = cdiv(cdiv(outputs, shape.products // 2), CLUSTER) * CLUSTER
    arguments = (*maps, ctypes.c_void_p(out.data_ptr()), *numbers)
    made.launch(blocks, shape.threads, arguments, overlaps=True)
    return out


def _map(matrix: Tensor, rows: int) -> Any:
    """Where the copying units find a matrix of which so many rows are copied at a time."""
    (height, width), stride = matrix.shape, matrix.stride(0) * matrix.element_size()
    return map_of(Box(matrix.data_ptr(), (width, height), (stride,), (SPAN, rows)), matrix.dtype)


@cache
def _kernel(shape: Shape, device: torch.device) -> Kernel | None:
    return kernel("wide", shape.source, shape.stages * shape.stage_bytes, device)
