"""What an operator can set about the server. The engine has its own settings."""

from dataclasses import dataclass
from pathlib import Path

from bough.config import is_int, is_number, require


@dataclass(frozen=True, slots=True)
class Settings:
    """Who may ask, how much, and by what name the model goes."""

    names: tuple[str, ...] = ()  # of the model; the first is the one answers carry. None: the engine's
    api_keys: tuple[str, ...] = ()  # none: everybody who can connect may ask; several: each has a cache of its own
    origins: tuple[str, ...] = ()  # of web pages that may ask; "*": all
    body_bytes: int = 32 << 20
    prompt_tokens: int | None = None  # None: the context of the engine
    queue: int = 256  # requests that may wait for their turn
    grace: float = 30.0  # seconds that running requests get to end when the server stops
    store: Path | None = None  # the folder of the model store that clients may see and change; None: they may not

    def __post_init__(self) -> None:
        for name in ("names", "api_keys", "origins"):
            value = getattr(self, name)
            fine = all(isinstance(each, str) and each for each in value) and len(set(value)) == len(value)
            shown = "(not shown)" if name == "api_keys" else value
            require(fine, name, shown, "different strings that are not empty")
        require(is_int(self.body_bytes, 1), "body_bytes", self.body_bytes, "a whole number, 1 or more")
        limited = self.prompt_tokens is None or is_int(self.prompt_tokens, 1)
        require(limited, "prompt_tokens", self.prompt_tokens, "a whole number, 1 or more, or None")
        require(is_int(self.queue, 0), "queue", self.queue, "a whole number, 0 or more")
        require(is_number(self.grace, 0), "grace", self.grace, "a number of seconds, 0 or more")
