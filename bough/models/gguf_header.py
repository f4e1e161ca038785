"""The head of a GGUF file: its metadata and the table of its tensors. Knows nothing of models.

Read with a few lines of our own: the reader of the gguf package makes an array of every string, which takes twelve
seconds for a vocabulary of 262,144, and believes every count. Here each length is checked against the bytes that are
left before anything is allocated for it, so a damaged file is an error and not a full memory.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bough.errors import BadWeights, ModelError

T = TypeVar("T")

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST = 1 << 24  # tensors, tokens, or bytes in a string: no file has more, so a larger count is damage
NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
STRING, ARRAY = 8, 9


class Metadata:
    """Keys and values: numbers, strings, lists of strings, arrays of numbers. A value that cannot be is an error."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values, self.where, self._prefix = values, where, prefix

    def under(self, prefix: str) -> "Metadata":
        """The keys that begin with the prefix, by the rest of their names."""
        return Metadata(self._values, self.where, self._prefix + prefix)

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def get(self, key: str, kind: type[T]) -> T | None:
        return self.need(key, kind) if key in self else None

    def need(self, key: str, kind: type[T]) -> T:
        if key not in self:
            raise ModelError(f"{self.where} lacks {self._prefix}{key}; take another conversion of the model")
        value = self._values[self._prefix + key]
        if type(value) is not kind:
            raise self._wrong(key, f"a {type(value).__name__} instead of a {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """How many or how wide: at least one."""
        value = self.need(key, int) if default is None else self.get(key, int) or default
        if value < 1:
            raise self._wrong(key, str(value))
        return value

    def sizes(self, key: str) -> list[int]:
        """The same of each layer, or one number for all that have it."""
        listed = type(self._values.get(self._prefix + key)) is np.ndarray
        return self.need(key, np.ndarray).tolist() if listed else [self.size(key)]

    def _wrong(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.where} has {what} for {self._prefix}{key}; it is damaged: download it again")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the table. Its shape is in torch's order, the fastest dimension last."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int  # from the start of the data

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Metadata
    tensors: list[Entry]
    data_start: int


def read_header(data: np.ndarray, where: str) -> Header:
    """The head of the file whose bytes these are."""
    cursor = _Cursor(data.data, where)
    if len(data) < 4 or cursor.take(4) != MAGIC:
        raise ModelError(f"{where} is not a GGUF file; give a .gguf file or a folder in the Hugging Face layout")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise ModelError(
            f"{where} is a GGUF file of version {version}, and Bough reads {VERSIONS[0]} and {VERSIONS[1]},"
            " little-endian; convert the model again"
        )
    tensors, keys = cursor.count(24), cursor.count(12)
    values = cursor.table(keys, _read_value)
    entries = cursor.table(tensors, _read_entry)
    metadata = Metadata(values, where)
    alignment = max(1, metadata.get("general.alignment", int) or 32)
    start = -(-cursor.at // alignment) * alignment
    return Header(metadata, [Entry(name, *entry) for name, entry in entries.items()], start)


class _Cursor:
    """A place in the head, moving forward; going past the end of the file is an error."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise BadWeights(f"{self.where} ends inside its header; it is cut short or damaged: download it again")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def count(self, each: int) -> int:
        """A count of things that take at least so many bytes each."""
        count = self.number("<Q")
        if count > min(MOST, (len(self.data) - self.at) // each):
            raise self.damaged(f"a count of {count}")
        return count

    def string(self) -> str:
        try:
            return str(self.take(self.count(1)), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a string that is not UTF-8") from None

    def table(self, count: int, read: Callable[["_Cursor"], T]) -> dict[str, T]:
        rows: dict[str, T] = {}
        for _ in range(count):
            name = self.string()
            if name in rows:
                raise self.damaged(f"{name!r} twice")
            rows[name] = read(self)
        return rows

    def damaged(self, what: str) -> BadWeights:
        return BadWeights(f"the header of {self.where} has {what} at byte {self.at}; it is damaged: download it again")


def _read_value(cursor: _Cursor) -> Any:
    kind = cursor.number("<I")
    if kind in NUMBERS:
        return _numbers(cursor, kind, 1)[0].item()
    if kind == STRING:
        return cursor.string()
    if kind == ARRAY:
        kind = cursor.number("<I")
        if kind in NUMBERS:
            return _numbers(cursor, kind, cursor.number("<Q"))
        if kind == STRING:
            return [cursor.string() for _ in range(cursor.count(8))]
    raise cursor.damaged(f"a value of type {kind}")


def _numbers(cursor: _Cursor, kind: int, count: int) -> np.ndarray:
    dtype = np.dtype("<" + NUMBERS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)


def _read_entry(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    dimensions = cursor.number("<I")
    if dimensions > 4:
        raise cursor.damaged(f"a tensor of {dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))
    return shape[::-1], cursor.number("<I"), cursor.number("<Q")
