"""What a caller can set: how to sample, and how much memory state may take."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from bough.errors import OptionError

Options = TypeVar("Options")


def from_options(kind: type[Options], options: dict[str, Any]) -> Options:
    """Build a dataclass of options from a dict; a name it does not have is an error that lists those it has."""
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise OptionError(f"unknown option {', '.join(unknown)}; {kind.__name__} has {', '.join(known)}")
    return kind(**options)


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise OptionError(f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends."""

    max_tokens: int = 256  # 0: read the prompt, write nothing
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a fresh one each time
    stop: tuple[str, ...] = field(default=())
    logprobs: int | None = None  # how many alternatives to report beside the chosen token; None: no logprobs
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more, and finite")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), name, getattr(self, name), "finite")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        _require(self.logprobs is None or 0 <= self.logprobs <= 64, "logprobs", self.logprobs, "between 0 and 64")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much memory state may take, and in what form it is kept."""

    device_bytes: int | None = None  # None: what is left beside the weights and the activations
    page_tokens: int = 32
    dtype: str = "auto"  # of K and V; auto: as the model computes

    def __post_init__(self) -> None:
        _require(self.device_bytes is None or self.device_bytes > 0, "device_bytes", self.device_bytes, "above 0")
        _require(1 <= self.page_tokens <= 1024, "page_tokens", self.page_tokens, "between 1 and 1024")
        _require(self.dtype in DTYPES, "cache dtype", self.dtype, "one of " + ", ".join(DTYPES))


DTYPES = ("auto", "float32", "bfloat16", "float16")
