"""Where every byte of state lies: the units of a model, and the slab that all of them divide evenly.

The arena is cut into slabs of one size. A slab is given to one unit (a page group, or the slots) and holds a whole
number of it, at one stride: entry i of a unit lies at i × stride whatever slab it is in, so kernels multiply and
never look up. Within a page or a slot the layers follow each other, so one copy moves all of them.

Knows kinds and sizes; allocates nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from bough.state.kinds import Kind, PageKind, Part

ALIGN = 256  # bytes; a stride that every dtype divides and that suits wide loads
FIELD_ALIGN = 16
DIVISIBLE = (1, 2, 6, 12, 60, 120, 360, 840, 2520, 5040, 27720, 55440)  # by more numbers than any smaller one


@dataclass(frozen=True, slots=True)
class Field:
    """One part of one layer inside a unit: its shape there, and where it starts."""

    part: Part
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.part.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """A page group (its layers share a reach) or the slots (all layers of slot kinds)."""

    name: str
    is_page: bool
    reach: int | None  # None: all earlier tokens
    fields: dict[tuple[int, str], Field]  # by layer and part
    nbytes: int  # used bytes
    stride: int  # bytes from one to the next
    per_slab: int

    def earliest(self, length: int) -> int:
        """The first token whose entry must be present to go on at `length`."""
        return 0 if self.reach is None else max(0, length - self.reach)


@dataclass(frozen=True, slots=True)
class Layout:
    """All units of a model and the slab they share."""

    kinds: tuple[Kind | None, ...]  # by layer; None: a layer without state
    units: tuple[Unit, ...]
    unit_of: dict[int, int]  # layer → index into units
    page_tokens: int
    slab_bytes: int

    def pages(self, start: int, end: int) -> tuple[int, int]:
        """The numbers [first, last) of the pages that hold tokens [start, end)."""
        return start // self.page_tokens, -(-end // self.page_tokens)

    @staticmethod
    def of(
        kinds: Sequence[Kind | None],
        *,
        page_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> "Layout":
        return layouts([kinds], page_tokens=page_tokens, dtype=dtype, kv_dtype=kv_dtype)[0]


def layouts(
    models: Sequence[Sequence[Kind | None]],
    *,
    page_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> list[Layout]:
    """The layouts of several models, of given kinds each, whose pools share one arena: all divide the same slab."""
    packed = [_packed(kinds, page_tokens, dtype, kv_dtype or dtype) for kinds in models]
    slab, counts = _slab([nbytes for units in packed for _, _, nbytes in units])
    per_slab, made = iter(counts), []
    for kinds, model in zip(models, packed, strict=True):
        units = tuple(
            Unit(_name(*key), *key, fields, nbytes, slab // count, count)
            for (key, fields, nbytes), count in zip(model, islice(per_slab, len(model)), strict=True)
        )
        unit_of = {layer: index for index, unit in enumerate(units) for layer, _ in unit.fields}
        made.append(Layout(tuple(kinds), units, unit_of, page_tokens, slab))
    return made


Group = tuple[bool, int | None]  # whether it is of pages, and its reach


def _packed(
    kinds: Sequence[Kind | None], page_tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> list[tuple[Group, dict[tuple[int, str], Field], int]]:
    """The units of a model: their fields and the bytes they take."""
    groups: dict[Group, dict[tuple[int, str], tuple[Part, tuple[int, ...]]]] = {}
    for layer, kind in enumerate(kinds):
        if kind is None:
            continue
        if isinstance(kind, PageKind):
            group = groups.setdefault((True, kind.reach), {})
            for part in kind.parts(kv_dtype):
                group[layer, part.name] = (part, (page_tokens, *part.shape))
        else:
            group = groups.setdefault((False, 0), {})
            for part in kind.parts(dtype):
                group[layer, part.name] = (part, part.shape)
    return [(key, *_pack(group)) for key, group in groups.items()]


def _name(is_page: bool, reach: int | None) -> str:
    if not is_page:
        return "slots"
    return "pages" if reach is None else f"pages of window {reach + 1}"


def _pack(parts: dict[tuple[int, str], tuple[Part, tuple[int, ...]]]) -> tuple[dict[tuple[int, str], Field], int]:
    """Lay the fields of one unit one after the other; returns them and the bytes they take."""
    fields, end = {}, 0
    for key, (part, shape) in parts.items():
        fields[key] = field = Field(part, shape, _round_up(end, FIELD_ALIGN))
        end = field.offset + field.nbytes
    return fields, end


def _slab(sizes: list[int]) -> tuple[int, list[int]]:
    """The slab size, and how many of each unit fit in it.

    A unit's stride is slab / count, so counts must divide the slab. Slabs of one to eight of the largest unit are
    tried, all multiples of a number with many divisors. Larger slabs waste less within but leave more of a slab unused,
    and what one unit holds is lost to the others: each further multiple of the largest unit must save 2% of padding.
    Padding stays below a quarter (up to five units), and is a few percent for the sizes of real models.
    """
    grains = [-(-max(size, 1) // ALIGN) for size in sizes]
    largest = max(grains, default=1)
    divisible = max(number for number in DIVISIBLE if number <= max(1, largest // 32))
    best: tuple[float, int, list[int]] | None = None
    for slab in range(_round_up(largest, divisible), 8 * largest + divisible, divisible):
        counts = [_divisor(slab, slab // grain) for grain in grains]
        waste = max((1 - count * grain / slab for count, grain in zip(counts, grains, strict=True)), default=0.0)
        score = waste + 0.02 * slab / largest
        if best is None or score < best[0]:
            best = (score, slab, counts)
    assert best is not None
    return best[1] * ALIGN, best[2]


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
