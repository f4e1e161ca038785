"""What models are called: `[namespace/]name[:tag]`, as Ollama's users write it. A name leads into the store alone."""

import re
from dataclasses import dataclass

from bough.errors import OptionError

LIBRARY, LATEST = "library", "latest"  # the namespace and the tag of names that leave them out
RESERVED = "bundled"  # the model in the box goes by it
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
PATTERN = re.compile(rf"(?:({PART})/)?({PART})(?::({PART}))?", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """The name of a stored model."""

    namespace: str
    model: str
    tag: str

    @staticmethod
    def parse(text: str) -> "Name":
        name = Name.maybe(text)
        if name is None:
            raise OptionError(
                f"{text!r} is no name of a model; write [namespace/]name[:tag] with letters, digits, '_', '-' and '.',"
                " each part beginning with a letter or digit and at most 96 characters long"
            )
        return name

    @staticmethod
    def maybe(text: str) -> "Name | None":
        """The name that this text is, if it is one."""
        match = PATTERN.fullmatch(text)
        if match is None:
            return None
        namespace, model, tag = match.groups()
        return Name(namespace or LIBRARY, model, tag or LATEST)

    def __str__(self) -> str:
        """As short as it can be written."""
        namespace = "" if self.namespace == LIBRARY else f"{self.namespace}/"
        return f"{namespace}{self.model}" + ("" if self.tag == LATEST else f":{self.tag}")

    @property
    def full(self) -> str:
        """With its tag, as lists show it."""
        return str(self) if self.tag != LATEST else f"{self}:{LATEST}"
