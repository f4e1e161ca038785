"""One piece of a token path as a file that describes itself.

    | header length, 8 bytes | header, JSON | tokens, int32 | rows of the first array | rows of the second | ...

An extent holds what was saved for the tokens [start, end) of a path: the tokens, and named arrays whose rows are pages
or slots as raw bytes. It is a safetensors file. The header has a digest of the tokens and of every row, and the file
is named after the digest of its header: the name verifies the header, the header verifies the rows, and nothing
outside the file has to agree with it. Where the piece belongs is told by a digest of the salted tokens before it.

Knows bytes and token ids; no folder, no tree, no torch.
"""

import json
import os
import stat
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "bough-extent-1"
DIGEST = 16  # bytes
LONGEST_HEADER = 100_000_000  # what readers of safetensors accept

Tokens = NDArray[np.int32]
Rows = NDArray[np.uint8]  # [rows, row_bytes]
Shapes = Mapping[str, tuple[int, int]]  # by array: rows, row_bytes
NO_TOKENS = np.empty(0, np.int32)


class Lost(StrEnum):
    """Why an extent cannot be used any more."""

    DAMAGED = "damaged"  # some bytes are not those that were written
    TRUNCATED = "truncated"
    FOREIGN = "foreign"  # of another model or format, or no file at all
    VANISHED = "vanished"  # somebody else removed it
    UNREADABLE = "unreadable"  # the system refuses to read it


def digest(data: Any) -> bytes:
    return blake2b(data, digest_size=DIGEST).digest()


def _raw(tokens: Tokens) -> memoryview:
    assert tokens.dtype == np.int32, "token ids of another width are other bytes"
    return np.ascontiguousarray(tokens).view(np.uint8).data


def salt_key(salt: str | None) -> bytes:
    """What stands for a salt wherever it is written down."""
    return digest(b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass"))


class PathDigest:
    """The digest of a salted path; grows with it, so one pass gives it at every length."""

    __slots__ = ("_hash",)

    def __init__(self, salt: bytes, tokens: Tokens = NO_TOKENS) -> None:
        self._hash = blake2b(salt, digest_size=DIGEST)
        self.extend(tokens)

    def extend(self, tokens: Tokens) -> None:
        self._hash.update(_raw(tokens))

    def copy(self) -> "PathDigest":
        twin = PathDigest.__new__(PathDigest)
        twin._hash = self._hash.copy()
        return twin

    def digest(self) -> bytes:
        return self._hash.digest()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is to become an extent. Nobody may write to its arrays any more."""

    salt: bytes  # salt_key(...)
    path: bytes  # PathDigest of the tokens before start
    start: int
    tokens: Tokens
    arrays: Mapping[str, Rows]
    meta: Mapping[str, Any] = field(default_factory=dict)  # small; whatever JSON keeps as it is

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def shapes(self) -> Shapes:
        return {name: (array.shape[0], array.shape[1]) for name, array in self.arrays.items()}


@dataclass(slots=True, eq=False)
class Extent:
    """What the header of a file says, and its tokens."""

    identity: str
    salt: bytes
    path: bytes
    start: int
    end: int
    arrays: Shapes
    sums: Mapping[str, bytes]  # one digest after the other: "tokens" has one, an array one for each row
    meta: Mapping[str, Any]
    nonce: bytes  # tells files of equal content apart
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    used: float = 0.0  # when it was last used, in seconds since 1970
    name: str = field(init=False)
    nbytes: int = field(init=False)  # of the file
    offsets: dict[str, int] = field(init=False)  # in the file

    def __post_init__(self) -> None:
        header = self.header()
        self.name = digest(header).hex()
        at = len(header)
        self.offsets = {"tokens": at}
        at += 4 * (self.end - self.start)
        for name, (rows, row_bytes) in self.arrays.items():
            self.offsets[name] = at
            at += rows * row_bytes
        self.nbytes = at

    @staticmethod
    def of(piece: Piece, identity: str) -> "Extent":
        assert len(piece.salt) == len(piece.path) == DIGEST, "a salt's key and a path's digest are wanted"
        assert all(array.dtype == np.uint8 and name != "tokens" for name, array in piece.arrays.items())
        sums = {"tokens": digest(_raw(piece.tokens))}
        sums |= {name: b"".join(digest(row) for row in array) for name, array in piece.arrays.items()}
        where = (piece.salt, piece.path, piece.start, piece.end)
        return Extent(identity, *where, piece.shapes, sums, piece.meta, os.urandom(DIGEST), piece.tokens)

    def header(self) -> bytes:
        """The first bytes of the file, its length included."""
        about = {"format": FORMAT, "identity": self.identity, "start": str(self.start), "end": str(self.end)}
        about |= {"salt": self.salt.hex(), "path": self.path.hex(), "nonce": self.nonce.hex()}
        about["sums"] = json.dumps({name: sums.hex() for name, sums in self.sums.items()})
        about["meta"] = json.dumps(dict(self.meta))
        count = self.end - self.start
        header: dict[str, Any] = {"__metadata__": about}
        header["tokens"] = {"dtype": "I32", "shape": [count], "data_offsets": [0, 4 * count]}
        at = 4 * count
        for name, (rows, row_bytes) in self.arrays.items():
            header[name] = {"dtype": "U8", "shape": [rows, row_bytes], "data_offsets": [at, at + rows * row_bytes]}
            at += rows * row_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def read(self, fd: int, name: str, first: int, last: int) -> Rows | Lost:
        """Rows [first, last) of an array, if they are what was written."""
        rows, row_bytes = self.arrays[name]
        assert 0 <= first <= last <= rows, f"rows [{first}, {last}) of {rows}"
        data = np.empty((last - first) * row_bytes, np.uint8)
        if not _fill(fd, data, self.offsets[name] + first * row_bytes):
            return Lost.TRUNCATED
        found = data.reshape(last - first, row_bytes)
        sums = b"".join(digest(row) for row in found)
        return found if sums == self.sums[name][DIGEST * first : DIGEST * last] else Lost.DAMAGED


def extent_size(identity: str, start: int, end: int, arrays: Shapes, meta: Mapping[str, Any]) -> int:
    """Bytes of the file that such a piece becomes."""
    none = bytes(DIGEST)
    sums = {"tokens": none} | {name: bytes(DIGEST * rows) for name, (rows, _) in arrays.items()}
    return Extent(identity, none, none, start, end, arrays, sums, meta, none).nbytes


def contents(piece: Piece, extent: Extent) -> Iterator[Any]:
    """The bytes of the file in order, in buffers of a row at most, none of them a copy."""
    yield extent.header()
    yield _raw(piece.tokens)
    for array in piece.arrays.values():
        yield from (row.data for row in array)


def load(fd: int, name: str, identity: str) -> Extent | Lost:
    """The extent in an open file of that name: header and tokens verified, rows not yet looked at."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        return Lost.FOREIGN
    prefix = os.pread(fd, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or 8 + length > facts.st_size:
        return Lost.TRUNCATED
    header = prefix + os.pread(fd, length, 8) if length <= LONGEST_HEADER else b""
    if digest(header).hex() != name:
        return Lost.DAMAGED
    extent = _parse(header[8:])
    # An extent's name is the digest of the header it would write: if the names agree, nothing was read amiss.
    if extent is None or extent.name != name or extent.identity != identity:
        return Lost.FOREIGN
    if facts.st_size != extent.nbytes:
        return Lost.TRUNCATED if facts.st_size < extent.nbytes else Lost.DAMAGED
    tokens = np.empty(4 * (extent.end - extent.start), np.uint8)
    if not _fill(fd, tokens, extent.offsets["tokens"]) or digest(tokens) != extent.sums["tokens"]:
        return Lost.DAMAGED
    extent.tokens = tokens.view(np.int32)
    extent.used = facts.st_mtime
    return extent


def _parse(header: bytes) -> Extent | None:
    """The extent that a header tells of, or None if it is not one of ours."""
    try:
        entries = json.loads(header)
        about = entries.pop("__metadata__")
        if about["format"] != FORMAT:
            return None
        del entries["tokens"]
        return Extent(
            identity=about["identity"],
            salt=bytes.fromhex(about["salt"]),
            path=bytes.fromhex(about["path"]),
            start=int(about["start"]),
            end=int(about["end"]),
            arrays={name: (entry["shape"][0], entry["shape"][1]) for name, entry in entries.items()},
            sums={name: bytes.fromhex(sums) for name, sums in json.loads(about["sums"]).items()},
            meta=json.loads(about["meta"]),
            nonce=bytes.fromhex(about["nonce"]),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def _fill(fd: int, data: Rows, offset: int) -> bool:
    """Read as many bytes as there is room for; False if the file ends before."""
    view = data.data
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            return False
        view, offset = view[count:], offset + count
    return True


def connect(extents: Iterable[Extent]) -> tuple[Iterator[tuple[Extent, Tokens]], list[Extent]]:
    """Puts extents together to paths: (each with all tokens of its path [0, end), parents first), and the stranded.

    An extent may start anywhere within another, and several may hold the same tokens. Stranded ones start where no
    other leads. The paths are made one by one as they are asked for, since together they may take much memory.
    """
    waiting: dict[tuple[bytes, int, bytes], list[Extent]] = defaultdict(list)
    starts: dict[bytes, set[int]] = defaultdict(set)
    for extent in extents:
        waiting[extent.salt, extent.start, extent.path].append(extent)
        starts[extent.salt].add(extent.start)
    order: list[Extent] = []  # depth first
    for salt, lengths in ((salt, sorted(lengths)) for salt, lengths in starts.items()):
        root = PathDigest(salt)
        stack = [(extent, root.copy()) for extent in waiting.pop((salt, 0, root.digest()), ())]
        while stack:
            extent, path = stack.pop()
            order.append(extent)
            at = extent.start
            for length in lengths[bisect_right(lengths, at) : bisect_right(lengths, extent.end)]:
                path.extend(extent.tokens[at - extent.start : length - extent.start])
                at = length
                stack += [(child, path.copy()) for child in waiting.pop((salt, length, path.digest()), ())]
    return _paths(order), [extent for left in waiting.values() for extent in left]


def _paths(order: Iterable[Extent]) -> Iterator[tuple[Extent, Tokens]]:
    # Of an extent's children the later ones come first. So the path before any of them is a part of the path of the one
    # that came just before: its parent's, or that of a descendant of its parent that leaves it no earlier.
    path = NO_TOKENS
    for extent in order:
        path = np.concatenate([path[: extent.start], extent.tokens])
        yield extent, path
