"""Recorded requests, read from files of two formats into one shape. Knows nothing of caches.

Mooncake: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`: ids of pieces of
512 tokens, each standing for all that is before it too; the last one may be partial. A piece becomes one symbol.

Agents: one JSON object a line with `timestamp` (µs), `input`, `output` and `session_id`. Text becomes symbols of four
characters each (about a token), numbered in order of first appearance; a remainder is a shorter symbol. Replies are
known, so they are part of the path once they end. Several files are one trace; each session starts when it did.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PIECE = 512
CHARACTERS = 4


class Malformed(Exception):
    """A trace that cannot be read, and why."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace."""

    time: float  # seconds
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]  # that each symbol of the prompt stands for
    reply: NDArray[np.int32]  # empty where it is not known
    made: int  # tokens of the reply
    whole: int  # symbols of the prompt that a longer prompt could have too


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    symbol_tokens: int  # that a usual symbol stands for
    requests: list[Recorded]

    @property
    def prompt_tokens(self) -> int:
        return sum(int(each.tokens.sum()) for each in self.requests)


def read(paths: list[Path], name: str | None = None) -> Trace:
    """One trace from files, or folders of them, of the same format; requests in order of time."""
    files = [file for path in paths for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])]
    if not files:
        raise Malformed(f"no .jsonl file in {', '.join(map(str, paths))}")
    rows = [(where, row) for file in files for where, row in _rows(file)]
    if not rows:
        raise Malformed(f"{files[0]} has no requests")
    first = rows[0][1]
    read_row = _Agents() if "input" in first else _Mooncake() if "hash_ids" in first else None
    if read_row is None:
        raise Malformed(f"{rows[0][0]}: neither `hash_ids` (Mooncake) nor `input` (agents) among {sorted(first)}")
    requests = []
    for where, row in rows:
        try:
            requests.append(read_row(row))
        except KeyError as error:
            raise Malformed(f"{where}: {error} is missing") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise Malformed(f"{where}: {error}") from error
        if not math.isfinite(requests[-1].time):
            raise Malformed(f"{where}: `timestamp` is not a time")
    requests.sort(key=lambda each: each.time)
    return Trace(name or paths[0].stem, read_row.symbol_tokens, requests)


def _rows(file: Path) -> list[tuple[str, dict]]:
    """The objects of a file and where they are. A last line that was cut off is left out."""
    rows = []
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Malformed(f"{file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines) and rows:
                    print(f"{where} is cut off: left out", file=sys.stderr)
                    continue
                raise Malformed(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise Malformed(f"{where}: not an object")
            rows.append((where, row))
    return rows


class _Mooncake:
    symbol_tokens = PIECE

    def __init__(self) -> None:
        self._numbers: dict[int | str, int] = {}  # of pieces: ids may be wider than symbols

    def __call__(self, row: dict) -> Recorded:
        ids = [self._numbers.setdefault(each, len(self._numbers)) for each in row["hash_ids"]]
        length = int(row["input_length"])
        if not ids or not 0 < length <= PIECE * len(ids) or length <= PIECE * (len(ids) - 1):
            raise ValueError(f"{len(ids)} pieces of {PIECE} tokens do not make {length} tokens")
        tokens = np.full(len(ids), PIECE, np.int32)
        tokens[-1] = length - PIECE * (len(ids) - 1)
        whole = len(ids) if tokens[-1] == PIECE else len(ids) - 1
        prompt, reply = np.array(ids, np.int32), np.empty(0, np.int32)
        return Recorded(float(row["timestamp"]) / 1e3, prompt, tokens, reply, int(row["output_length"]), whole)


class _Agents:
    symbol_tokens = 1

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, row: dict) -> Recorded:
        prompt = self._symbols(row["input"])
        reply = self._symbols(row["input"] + row["output"])[len(prompt) - 1 :]  # the last one may have grown
        tokens = np.ones(len(prompt), np.int32)
        if not len(prompt):
            raise ValueError("an empty input")
        whole = len(prompt) - bool(len(row["input"]) % CHARACTERS)
        return Recorded(float(row["timestamp"]) / 1e6, prompt, tokens, reply, len(reply), whole)

    def _symbols(self, text: str) -> NDArray[np.int32]:
        numbers = self._numbers
        pieces = (text[at : at + CHARACTERS] for at in range(0, len(text), CHARACTERS))
        return np.array([numbers.setdefault(piece, len(numbers)) for piece in pieces], np.int32)
