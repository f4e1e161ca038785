"""What Bough keeps beside a model, in bough.json: what its Modelfile said of it, and what it was made of.

PARAMETERS are the ones of a Modelfile; here is what each means to us.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bough.config import SamplingParams, is_int, require
from bough.errors import ModelError, OptionError
from bough.models.config import read_json

FILE, DRAFT = "bough.json", "draft"  # beside the weights: this, and the folder of who drafts for them
VERSION = 1
LEAST_TOP_P = 1e-9  # the likeliest token alone, which is what 0 asks for
SAMPLING = {  # PARAMETER → field of SamplingParams
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
}
CONTEXT = "num_ctx"


@dataclass(frozen=True, slots=True)
class Weighed:
    """Weights as they are stored: how many, in how many bytes, and by what scheme they were made smaller."""

    count: int
    size: int
    scheme: str | None = None

    def __post_init__(self) -> None:
        require(is_int(self.count, 0) and is_int(self.size, 0), "weights", (self.count, self.size), "whole numbers")
        require(self.scheme is None or isinstance(self.scheme, str), "scheme", self.scheme, "text, or nothing")

    @property
    def bits(self) -> float:
        return 8 * self.size / max(1, self.count)


@dataclass(frozen=True, slots=True)
class About:
    """What bough.json says. Without one, nothing."""

    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    license: tuple[str, ...] = ()
    source: str | None = None  # what FROM named
    draft_source: str | None = None  # what DRAFT named
    drafter: str | None = None  # what kind of drafter is stored with it: assistant, mtp or model
    weights: Weighed | None = None
    draft_weights: Weighed | None = None

    def __post_init__(self) -> None:
        for name in ("template", "system", "source", "draft_source", "drafter"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str), name, value, "text, or nothing")
        require(all(isinstance(each, str) for each in self.license), "license", self.license, "a list of texts")
        require(isinstance(self.parameters, Mapping), "parameters", self.parameters, "names and values")
        self.sampling()
        context = self.parameters.get(CONTEXT)
        require(context is None or is_int(context, 1), CONTEXT, context, "a whole number, 1 or more")

    @staticmethod
    def beside(path: Path) -> "About":
        """What is said of the model in a folder, or in a file in one."""
        file = (path.parent if path.is_file() else path) / FILE
        return About.read(file) if file.exists() else About()

    @staticmethod
    def read(file: Path) -> "About":
        told = read_json(file)
        try:
            if told.pop("version") != VERSION:
                raise ValueError("it is of another version of Bough")
            weighed = {
                name: Weighed(**told.pop(name)) for name in ("weights", "draft_weights") if told.get(name) is not None
            }
            return About(**{**told, "license": tuple(told.get("license", ())), **weighed})
        except (KeyError, TypeError, ValueError, OptionError) as error:
            raise ModelError(f"{file} is not usable ({error}); create the model again") from None

    def to_json(self) -> bytes:
        told = {name: value for name, value in asdict(self).items() if value not in (None, (), {})}
        return json.dumps({"version": VERSION, **told}, indent=1, ensure_ascii=False).encode()

    def draft_beside(self, path: Path) -> Path | None:
        """Who drafts for the model in `path`, where that is a model of its own."""
        if self.drafter not in ("assistant", "model"):
            return None
        folder = (path.parent if path.is_file() else path) / DRAFT
        return next(folder.glob("*.gguf"), folder)

    @property
    def context(self) -> int | None:
        return self.parameters.get(CONTEXT)

    def sampling(self, context: int = 2**31 - 1) -> dict[str, Any]:
        """The fields of SamplingParams that the parameters set. As many tokens as fit, where num_predict says so."""
        given = {SAMPLING[name]: value for name, value in self.parameters.items() if name in SAMPLING}
        if given.get("max_tokens", 0) < 0:
            given["max_tokens"] = context
        if given.get("seed", 0) < 0:
            given["seed"] = None
        if given.get("top_k", 0) < 0:
            given["top_k"] = 0
        if "top_p" in given:
            given["top_p"] = max(given["top_p"], LEAST_TOP_P)
        SamplingParams(**given)
        return given


NOTHING = About()
