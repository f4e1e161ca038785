"""The gated delta rule for many rows whose slots lag behind, in one launch (late.cu): what seen.py does in two for few.

In CUDA C++, since what Triton has come through shared memory gets in its threads' way: it took longer than without.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from bough.ops.delta import DeltaLayer
from bough.ops.ragged import OWED, Owed, ShortRows
from bough.ops.spans import processors
from bough.ops.triton.chunks import EPS
from bough.ops.triton.native import Box, Kernel, able, kernel, map_of, with_defined

PIECE = 32  # rows of a state that come at once
RING, BLOCKS = 2, 3  # pieces of a block that are there or on their way, and blocks on a processor, at the most
ROOM, BESIDE = 228 << 10, 2 << 10  # bytes of shared memory on a processor, and of each block beside its own
EVEN = 4  # heads of a block, up to which all have as many
OLD_STEP = 80  # bytes from one recorded key to the next: four that are read at a time lie in different banks
WEIGHTS = {torch.bfloat16: "bf16", torch.float32: "float"}  # types of the norm's


class Brought(NamedTuple):
    """What tokens [T, ...] bring to a layer."""

    q: Tensor  # [T, k heads, dk]; it and k are parts of one tensor
    k: Tensor
    v: Tensor  # [T, heads, dv]
    z: Tensor  # [T, heads · dv]
    a: Tensor  # [T, heads]
    b: Tensor


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    group: int  # of them to a key head
    dk: int
    dv: int
    each: int  # tokens that a row has at the most
    eps: float
    weight: str

    @property
    def source(self) -> str:
        made_for = {name.upper(): value for name, value in self._asdict().items()} | {"EPS": f"{self.eps}f"}
        fixed = {"OWED": OWED, "PIECE": PIECE, "RING": RING, "OLD_STEP": OLD_STEP, "LENGTH_EPS": f"{EPS.value}f"}
        room = {"BLOCKS": self.blocks, "ALL_BYTES": self.shared_bytes}
        return with_defined(["seen.cuh", "late.cu"], made_for | fixed | room)

    @property
    def shared_bytes(self) -> int:
        """As seen.cuh lays them out."""
        vectors = cdiv(2 * self.each, 8) * 8
        slot = PIECE * self.dv * 4 + OWED * OLD_STEP + vectors * PIECE * 2
        own = OWED * (self.dv + 1) * 4 + 2 * self.each * self.dv * 2
        gates, seen = cdiv(self.each, 2) * 16, vectors * (self.dv * 4 + 16)
        of_warp, of_layer = self.each * 4 + OWED * 4 + 16, (2 * self.heads + self.dv) * 4
        return RING * slot + 2 * own + gates + seen + self.dv // 32 * of_warp + of_layer

    @property
    def blocks(self) -> int:
        """That a processor has room for at a time."""
        return max(1, min(BLOCKS, ROOM // (self.shared_bytes + BESIDE)))


def advance(
    brought: Brought,
    out: Tensor,
    states: Tensor,
    rows: ShortRows,
    layer: DeltaLayer,
    kept: tuple[Tensor, ...],
    owed: Owed,
) -> bool:
    """Fills out [T, heads, dv], records what is kept, and stores states where they are to be. False: not for these."""
    if not _is_able(brought, states, layer):
        return False
    (_, heads, dk, dv), (tokens, k_heads, _), count = states.shape, brought.k.shape, len(rows.start)
    shape = Shape(heads, heads // k_heads, dk, dv, cdiv(tokens, count), layer.eps, WEIGHTS[layer.norm.dtype])
    made, pieces = _kernel(shape, brought.k.device), map_of(_pieces(states), states.dtype)
    if made is None or pieces is None:
        return False
    q, k, *others = brought
    tensors = (
        *others, out, *kept, states, rows.start, rows.tokens, rows.read, owed.start, owed.tokens, owed.keep,
        owed.record, layer.rate, layer.dt_bias, layer.norm,
    )  # fmt: skip
    strides = (each.stride(0) for each in (*brought, states))
    to_q = (q.data_ptr() - k.data_ptr()) // k.element_size()
    fields = [k.data_ptr(), to_q, *(each.data_ptr() for each in tensors), *strides]
    told = pieces, (ctypes.c_int64 * len(fields))(*fields), ctypes.c_int(heads * count)
    made.launch(_blocks(heads * count, shape.blocks * processors(k.device)), dv, told, overlaps=True)
    return True


def _blocks(heads: int, most: int) -> int:
    """As many as there is room for at a time. Where each has few heads, so many that all have as many: else most would
    wait for the last."""
    turns = cdiv(heads, most)
    return cdiv(heads, turns) if turns <= EVEN else most


def _pieces(states: Tensor) -> Box:
    """32 columns of PIECE rows at a time. Of eight rows that follow each other, which a thread takes, lines of two lie
    beside those of others, so that all that threads read at a time is in different banks."""
    (slots, heads, dk, dv), size = states.shape, states.element_size()
    line = dv * size
    sizes, strides = (dv, 2, heads * dk // 8, 4, slots), (line, 8 * line, 2 * line, states.stride(0) * size)
    return Box(states.data_ptr(), sizes, strides, (32, 2, PIECE // 8, 4, 1))


def _is_able(brought: Brought, states: Tensor, layer: DeltaLayer) -> bool:
    (dk, dv), (q, k, v, z, *_) = states.shape[2:], brought
    alike = all(each.dtype == torch.bfloat16 for each in brought) and layer.norm.dtype in WEIGHTS
    exact = states.dtype == layer.rate.dtype == layer.dt_bias.dtype == torch.float32
    laid_out = all(each.stride(0) % 8 == 0 for each in (q, k, v, z)) and states.stride(0) % 4 == 0
    aligned = all(each.data_ptr() % 16 == 0 for each in (q, k, v, z, states))
    fits = dk % (RING * PIECE) == dv % 32 == 0 and dv <= 128
    return alike and exact and laid_out and aligned and fits and able(k.device)


@cache
def _kernel(shape: Shape, device: torch.device) -> Kernel | None:
    return kernel("late", shape.source, shape.shared_bytes, device)
