"""What a JSON request may hold: tables that both check a body and describe it in the served OpenAPI document.

A Shape reads a value, or raises Invalid with the path of what is wrong and what is allowed there. Unknown names in an
object are ignored, as the APIs that clients were written for do, and null counts as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bough.config import LARGEST, is_int, is_number

JsonSchema = dict[str, Any]


class Invalid(Exception):
    """A value that is not of its shape."""

    def __init__(self, path: str, allowed: str, value: object = ...) -> None:
        found = "" if value is ... else f", not {_brief(value)}"
        super().__init__(f"{path or 'the body'} must be {allowed}{found}")
        self.path = path


class Shape(Protocol):
    """What a value may be."""

    def read(self, value: Any, path: str) -> Any: ...
    def schema(self) -> JsonSchema: ...


@dataclass(frozen=True, slots=True)
class Text:
    """A string; one of `among`, if there are any."""

    among: tuple[str, ...] = ()
    least: int = 0
    about: str = ""

    def read(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise Invalid(path, "a string", value)
        if self.among and value not in self.among:
            why = f" ({self.about})" if self.about else ""
            raise Invalid(path, "one of " + ", ".join(map(repr, self.among)) + why, value)
        if len(value) < self.least:
            raise Invalid(path, "a string that is not empty")
        return value

    def schema(self) -> JsonSchema:
        limits: JsonSchema = {"enum": list(self.among)} if self.among else {}
        if self.least:
            limits["minLength"] = self.least
        return _described({"type": "string"} | limits, self.about)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in [low, high]. 2.0 is one, as it is in JSON Schema."""

    low: int
    high: int = 2**63 - 1
    about: str = ""

    def read(self, value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_int(value, self.low, self.high):
            bounded = self.high < 2**63 - 1 or is_int(value, self.low)
            allowed = f"from {self.low} to {self.high}" if bounded else f"{self.low} or more"
            raise Invalid(path, f"a whole number, {allowed}", value)
        return int(value)

    def schema(self) -> JsonSchema:
        return _described({"type": "integer", "minimum": self.low, "maximum": self.high}, self.about)


@dataclass(frozen=True, slots=True)
class Number:
    """A number in [low, high]."""

    low: float = -LARGEST
    high: float = LARGEST
    above: bool = False  # whether `low` itself is excluded
    about: str = ""

    def read(self, value: Any, path: str) -> float:
        if not is_number(value, self.low, self.high) or (self.above and value == self.low):
            least = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
            most = "" if self.high == LARGEST else f" and at most {self.high:g}"
            raise Invalid(path, f"a number, {least}{most}", value)
        return float(value)

    def schema(self) -> JsonSchema:
        low = "exclusiveMinimum" if self.above else "minimum"
        return _described({"type": "number", low: self.low, "maximum": self.high}, self.about)


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    about: str = ""

    def read(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise Invalid(path, "true or false", value)
        return value

    def schema(self) -> JsonSchema:
        return _described({"type": "boolean"}, self.about)


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of values of one shape."""

    item: Shape
    least: int = 0
    most: int | None = None
    about: str = ""

    def read(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise Invalid(path, "a list", value)
        if len(value) < self.least:
            raise Invalid(path, "a list that is not empty" if self.least == 1 else f"a list of {self.least} or more")
        if self.most is not None and len(value) > self.most:
            raise Invalid(path, f"a list of at most {self.most}")
        return [self.item.read(each, f"{path}[{index}]") for index, each in enumerate(value)]

    def schema(self) -> JsonSchema:
        limits: JsonSchema = {"minItems": self.least} if self.least else {}
        if self.most is not None:
            limits["maxItems"] = self.most
        return _described({"type": "array", "items": self.item.schema()} | limits, self.about)


@dataclass(frozen=True, slots=True)
class Either:
    """A value of one of several shapes; the first that fits reads it."""

    shapes: tuple[Shape, ...]
    allowed: str  # in words, for when none fits
    about: str = ""

    def read(self, value: Any, path: str) -> Any:
        deepest: Invalid | None = None
        for shape in self.shapes:
            try:
                return shape.read(value, path)
            except Invalid as error:
                if len(error.path) > len(path):  # it was of this shape, but for something inside
                    deepest = error
        raise deepest or Invalid(path, self.allowed, value)

    def schema(self) -> JsonSchema:
        return _described({"anyOf": [shape.schema() for shape in self.shapes]}, self.about)


@dataclass(frozen=True, slots=True)
class Record:
    """An object with known names. `open` ones keep what they do not know, for templates to read."""

    fields: Mapping[str, Shape]
    needed: tuple[str, ...] = ()
    open: bool = False
    about: str = ""

    def read(self, value: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Invalid(path, "an object", value)
        known = {
            name: shape.read(value[name], _join(path, name))
            for name, shape in self.fields.items()
            if value.get(name) is not None
        }
        for name in self.needed:
            if name not in known:
                raise Invalid(_join(path, name), "given")
        return {**value, **known} if self.open else known

    def schema(self) -> JsonSchema:
        properties = {name: shape.schema() for name, shape in self.fields.items()}
        for name in self.fields.keys() - set(self.needed):
            properties[name] = _or_null(properties[name])
        needed: JsonSchema = {"required": list(self.needed)} if self.needed else {}
        return _described({"type": "object", "properties": properties} | needed, self.about)


def _or_null(schema: JsonSchema) -> JsonSchema:
    if not schema.keys() - {"description"}:
        return schema
    about = {"description": schema["description"]} if "description" in schema else {}
    bare = {key: value for key, value in schema.items() if key != "description"}
    return {"anyOf": [bare, {"type": "null"}]} | about


def _described(schema: JsonSchema, about: str) -> JsonSchema:
    return schema | {"description": about} if about else schema


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _brief(value: object) -> str:
    if isinstance(value, dict | list):
        return {dict: "an object", list: "a list"}[type(value)]
    text = repr(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return text if len(text) <= 80 else text[:80] + "..."
