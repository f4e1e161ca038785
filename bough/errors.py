"""Every error Bough raises on purpose.

    BoughError
    ├── ModelError            a model folder or file cannot be used
    │   ├── UnknownArchitecture
    │   └── BadWeights        tensors missing, unexpected, misshapen or truncated
    ├── RequestError          what was asked cannot be done; nothing was changed
    │   ├── BadPrompt         neither text nor token ids
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   ├── TokenOutOfRange
    │   ├── TemplateError     a chat template is missing or broken
    │   └── OptionError       an unknown or impossible option
    ├── PoolFull              memory for state is used up; nothing was changed
    ├── DiskUnavailable       a disk cache cannot be used; everything works without it
    ├── BadLogits             the model computed something that is not a number
    └── StateError            a state was used in a way its kinds do not allow

The message of each says what to do about it. Bugs of our own are assertions, not these.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class BoughError(Exception):
    """The base of all errors that a user or a caller can do something about."""


class ModelError(BoughError):
    """A model folder or file cannot be used."""


class UnknownArchitecture(ModelError):
    """The model is of a family that Bough does not run."""


class BadWeights(ModelError):
    """Tensors are missing, unexpected, of the wrong shape, or cut short."""


@contextmanager
def expecting_tokenizer(otherwise: str) -> Iterator[None]:
    """What the tokenizers library raises at a file is a ModelError that begins so.

    It raises nothing more precise than Exception, and where it panics not even that.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{otherwise} ({error}); download it again") from error


class RequestError(BoughError):
    """What was asked cannot be done; nothing was changed."""


class BadPrompt(RequestError):
    """The prompt is neither text nor token ids."""


class EmptyPrompt(RequestError):
    """The prompt has no tokens."""


class PromptTooLong(RequestError):
    """The prompt does not fit the context."""


class TokenOutOfRange(RequestError):
    """A token id is outside the vocabulary."""


class TemplateError(RequestError):
    """The chat template is missing, broken, or refused the messages."""


class OptionError(RequestError):
    """An option is unknown or has an impossible value."""


class PoolFull(BoughError):
    """The memory for state is used up; nothing was changed."""

    def __init__(self, message: str, needs: list[int] | None = None) -> None:
        super().__init__(message)
        self.needs = needs  # entries of each unit that could not be lent, if that was it


class DiskUnavailable(BoughError):
    """The folder of a disk cache cannot be used, or is in use. Everything works without it, but for the disk tier."""


class BadLogits(BoughError):
    """The logits of some rows hold a NaN, an infinity, or nothing but -inf. The other rows can be sampled again."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            "the model gave logits that are not finite; its weights are damaged, or its activations overflow in this"
            " dtype (try bfloat16 or float32)"
        )
        self.rows = rows


class StateError(BoughError):
    """A state was asked for something that its kinds or its condition do not allow."""
