"""What a caller can set: how to sample, and how much memory state may take."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bough.errors import OptionError

LARGEST = 3.4e38  # in float32, which is what the sampler computes in


def is_int(value: object, low: int, high: float = float("inf")) -> bool:
    """Whether this is a whole number (True is none) in [low, high]."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float = -LARGEST, high: float = LARGEST) -> bool:
    """Whether this is a number (True is none, nor is NaN) in [low, high]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise OptionError(f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a request must be. An engine reads it, and may refuse it, when a request is made with it."""

    kind: str  # json_schema, regex or lark
    source: str

    def __post_init__(self) -> None:
        require(self.kind in GRAMMARS, "kind of grammar", self.kind, "one of " + ", ".join(GRAMMARS))
        require(isinstance(self.source, str), "source of a grammar", self.source, "text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> "Grammar":
        """JSON that the schema (as such, or as JSON text) allows; {} allows any. Properties come in its order."""
        try:
            known = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(dict(known) if isinstance(known, Mapping) else known, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"the JSON schema is not JSON ({error}); correct it") from None
        require(isinstance(known, Mapping | bool), "JSON schema", known, "an object, true or false")
        return cls("json_schema", source)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that matches from its beginning to its end (in the syntax of Rust's regex, without look-around)."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> "Grammar":
        """Text of a context-free grammar in llguidance's form of Lark; it begins with the rule `start`."""
        return cls("lark", source)


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
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # what is added to the logits of token ids
    seed: int | None = None  # None: a fresh one each time
    stop: tuple[str, ...] = field(default=())
    logprobs: int | None = None  # how many alternatives to report beside the chosen token; None: no logprobs
    ignore_eos: bool = False
    cache_salt: str | None = None  # requests with different ones share nothing through the cache
    deadline: float | None = None  # seconds from now, after which the request ends with what it has
    grammar: Grammar | None = None  # what the text must be; it ends where nothing can follow
    draft: str | None = "auto"  # None: this request is decoded without drafts; auto: as the engine does

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, Iterable):
            object.__setattr__(self, "stop", tuple(self.stop))
        require(is_int(self.max_tokens, 0), "max_tokens", self.max_tokens, "a whole number, 0 or more")
        require(is_number(self.temperature, 0), "temperature", self.temperature, "a number, 0 or more, and finite")
        require(is_int(self.top_k, 0), "top_k", self.top_k, "a whole number, 0 (all) or more")
        require(is_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number above 0 and at most 1")
        require(is_number(self.min_p, 0, 1), "min_p", self.min_p, "a number between 0 and 1")
        positive = is_number(self.repetition_penalty, 0) and self.repetition_penalty > 0
        require(positive, "repetition_penalty", self.repetition_penalty, "a number above 0, and finite")
        for name in ("presence_penalty", "frequency_penalty"):
            require(is_number(getattr(self, name)), name, getattr(self, name), "a number, and finite")
        if isinstance(self.logit_bias, Mapping):  # pairs can be hashed
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        biased = isinstance(self.logit_bias, tuple) and all(map(_is_bias, self.logit_bias))
        require(biased, "logit_bias", self.logit_bias, "finite numbers by token id")
        seeded = self.seed is None or is_int(self.seed, 0, 2**63 - 1)
        require(seeded, "seed", self.seed, "a whole number between 0 and 2**63 - 1, or None")
        strings = isinstance(self.stop, tuple) and all(isinstance(each, str) and each for each in self.stop)
        require(strings, "stop", self.stop, "strings that are not empty")
        counted = self.logprobs is None or is_int(self.logprobs, 0, 64)
        require(counted, "logprobs", self.logprobs, "a whole number between 0 and 64, or None")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        salted = self.cache_salt is None or isinstance(self.cache_salt, str)
        require(salted, "cache_salt", self.cache_salt, "text, or None")
        timed = self.deadline is None or (is_number(self.deadline, 0) and self.deadline > 0)
        require(timed, "deadline", self.deadline, "a number of seconds above 0, or None")
        constrained = self.grammar is None or isinstance(self.grammar, Grammar)
        require(constrained, "grammar", self.grammar, "a Grammar, or None")
        require(self.draft in ("auto", None), "draft", self.draft, '"auto", or None')


def _is_bias(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and is_int(pair[0], 0) and is_number(pair[1])


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much memory state may take on each tier, in what form it is kept, and what goes first."""

    enabled: bool = True  # False: nothing is kept from one request for another
    # None: a quarter of the available memory on CPUs, 80% of the free memory on a GPU; at most
    # four times what as many sequences as may run take at full context.
    device_bytes: int | None = None
    page_tokens: int = 32
    dtype: str = "auto"  # of K and V; auto: as the model computes
    host_bytes: int | None = None  # 0: no host tier; None: a quarter of the memory beside a GPU, at most 16 GiB
    disk_path: str | os.PathLike[str] | None = None  # a folder; None: nothing is written to disk
    disk_bytes: int | None = None  # for each model in the folder; None: half of what is free there, at most 64 GiB
    disk_write_rate: int = 256 << 20  # bytes a second
    policy: str = "value"

    def __post_init__(self) -> None:
        require(isinstance(self.enabled, bool), "enabled", self.enabled, "True or False")
        for name, least in (("device_bytes", 1), ("host_bytes", 0), ("disk_bytes", 1)):
            value = getattr(self, name)
            sized = value is None or is_int(value, least, 2**63 - 1)
            require(sized, name, value, f"a whole number, {least} or more and below 2**63, or None")
        path = self.disk_path is None or isinstance(self.disk_path, str | os.PathLike)
        require(path, "disk_path", self.disk_path, "a path, or None")
        rate = self.disk_write_rate
        require(is_int(rate, 1, 2**63 - 1), "disk_write_rate", rate, "a whole number of bytes a second, 1 or more")
        require(self.policy in POLICIES, "cache policy", self.policy, "one of " + ", ".join(POLICIES))
        require(is_int(self.page_tokens, 1, 1024), "page_tokens", self.page_tokens, "a whole number from 1 to 1024")
        require(self.dtype in DTYPES, "cache dtype", self.dtype, "one of " + ", ".join(DTYPES))


GRAMMARS = ("json_schema", "regex", "lark")
POLICIES = ("value", "lru")
DTYPES = ("auto", "float32", "bfloat16", "float16")
