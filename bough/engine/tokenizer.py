"""Text to token ids and back.

Tokenizer    the vocabulary of one model: encodes prompts and rendered chats, decodes token lists.
Detokenizer  the same text piece by piece, while the tokens come in.

For a Hugging Face folder both give the ids and the text that transformers gives. Nothing here knows of models or
requests; the source of a chat template is only carried along for template.py.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Core

from bough.errors import ModelError, RequestError, expecting_tokenizer

_USUAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Place(NamedTuple):
    """A place between two tokens, counted in characters of the text and in tokens."""

    char: int
    token: int


class Tokenizer:
    """A `tokenizers.Tokenizer` with the names of its special tokens and the source of its chat template.

    `special` maps names such as "bos_token" to token strings. `template` is one source or several by name. `add_bos`
    says whether a raw prompt begins with BOS; None leaves it to the post-processor of `core`. `core` is taken over:
    the strings in `special` become special tokens of it.
    """

    def __init__(
        self,
        core: Core,
        *,
        special: Mapping[str, str],
        template: str | dict[str, str] | None = None,
        add_bos: bool | None = None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.special = dict(special)
        self.template = template
        _declare_special(core, self.special.values())
        added = core.get_added_tokens_decoder()
        # Asked of the core, since its own flags can differ from what it does after a token was declared twice.
        self.special_ids = frozenset(
            token for token in added if not core.decode([token, token]) and core.decode([token, token], False)
        )
        self.eos_ids = frozenset(self._ids("eos_token", "eot_token"))
        self._add_bos = add_bos
        self._bos = self._ids("bos_token")
        self._splitting = {token: flags.content for token, flags in added.items() if not flags.normalized}
        self.split_reach = 1 + max(map(len, self._splitting.values()), default=0)
        kinds = list(_decoder_kinds(core))
        self.byte_level = [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face folder, or None when it has no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        with expecting_tokenizer(f"{path} is not a usable tokenizer"):
            core = Core.from_file(str(path))
        config = _read_json(folder / "tokenizer_config.json")
        template = _read_template(folder, config)
        if "added_tokens_decoder" not in config:  # the older form of the same facts
            config |= _read_json(folder / "special_tokens_map.json")
        try:
            core.add_tokens(_numbered_tokens(config))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"added tokens in {folder / 'tokenizer_config.json'} are malformed ({error})") from error
        named = _named_tokens(config)
        _declare_special(core, [*named.values(), *_unnamed_tokens(config)])  # new ones get their ids in this order
        # add_bos_token is not read: beside a tokenizer.json, transformers trusts its post-processor alone.
        return cls(core, special=named, template=template)

    @property
    def vocab_size(self) -> int:
        return self._core.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a raw prompt, with the BOS and the like that the model expects.

        With `special=False` nothing is added: for text that a chat template rendered. Either way the strings of
        special tokens in the text become their ids.
        """
        if not special:
            return self._encode(text).ids
        if self._add_bos is None:
            return self._encode(text, special=True).ids
        return (self._bos if self._add_bos else []) + self._encode(text).ids

    def encode_split(self, text: str, *, follows: bool = False) -> tuple[list[int], list[Place]]:
        """Token ids of rendered text and its splits, the places where an added token begins.

        The text before a split and the text from it on are tokenised apart. With `follows` the text comes after other
        text, so nothing that belongs to the start of a text (such as the space that a metaspace tokenizer puts there)
        is added.
        """
        lead, head = "", list[int]()
        encoding = self._encode(text)
        for candidate in ("\n", "a") if follows else ():
            # Encoded behind a stand-in for that other text: one that keeps its own tokens beside this text.
            ids, joined = self._encode(candidate).ids, self._encode(candidate + text)
            if joined.ids[: len(ids)] == ids:
                lead, head, encoding = candidate, ids, joined
                break
        joined_text, skip = lead + text, len(head)
        splits = [
            Place(start - len(lead), at - skip)
            for at, (token, (start, _)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True))
            # The model itself can also produce such an id, from text that only normalises to its string: no split.
            if at >= skip and token in self._splitting and joined_text.startswith(self._splitting[token], start)
        ]
        return encoding.ids[skip:], splits

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return self._core.decode(tokens, skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the middle of a text; a part of a character is possible."""
        written = self._core.id_to_token(token)
        if written is None:
            return b""
        if self.byte_level:
            if all(char in _BYTE_ALPHABET for char in written):
                return bytes(_BYTE_ALPHABET[char] for char in written)
            return written.encode()
        if self.is_byte(token):
            return bytes.fromhex(written[3:5])
        # The token after itself, since decoders treat the first token of a text differently.
        alone, twice = self.decode([token], skip_special=False), self.decode([token, token], skip_special=False)
        return twice[len(alone) :].encode()

    def is_byte(self, token: int) -> bool:
        """Whether this is one of the 256 tokens that a byte-fallback tokenizer has for single bytes."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(self._core.id_to_token(token) or "") is not None

    def shows(self, token: int, *, skip_special: bool) -> bool:
        """Whether the token takes part in decoding at all."""
        return not (skip_special and token in self.special_ids) and bool(self._core.id_to_token(token))

    def _encode(self, text: str, *, special: bool = False) -> Encoding:
        try:
            return self._core.encode(text, add_special_tokens=special)
        except TypeError as error:
            raise RequestError("the text holds half a surrogate pair; send valid Unicode") from error

    def _ids(self, *names: str) -> list[int]:
        ids = (self._core.token_to_id(self.special[name]) for name in names if name in self.special)
        return [token for token in ids if token is not None]


class Detokenizer:
    """Gives the text of a growing token sequence in pieces that never end inside a character.

    The text is what follows the `context`, the tokens of the prompt: decode(context + tokens) without what it has in
    common with decode(context). So a continuation keeps the space before its first word, and a character whose first
    bytes end the prompt belongs to the continuation. All pieces together are exactly that text, for any tokens.
    The cost of a token does not depend on how many came before.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = _ByteStream(tokenizer) if tokenizer.byte_level else _PieceStream(tokenizer)
        for token in self._tail(context):
            self._stream.feed(token)
        self._shown = self._stream.unsettled()  # what decode(context) shows for its unfinished end

    def push(self, tokens: Sequence[int]) -> str:
        return self._new("".join(map(self._stream.feed, filter(self._shows, tokens))))

    def finish(self) -> str:
        """The text still held back. No tokens may be pushed after it."""
        return self._new(self._stream.unsettled())

    @property
    def settled(self) -> bool:
        """Whether the tokens so far stand for the text so far: nothing is held back."""
        return not self._stream.unsettled()

    def _shows(self, token: int) -> bool:
        return self._tokenizer.shows(token, skip_special=self._skip_special)

    def _tail(self, context: Sequence[int]) -> list[int]:
        """The end of the context that can bear on what follows it."""
        tail = []
        for token in reversed(context):
            if self._shows(token):
                tail.append(token)
                # A character has at most four bytes, and a token at least one.
                if len(tail) >= 4 and not self._tokenizer.is_byte(token):
                    break
        return tail[::-1]

    def _new(self, text: str) -> str:
        if not (text and self._shown):
            return text
        shown, self._shown = self._shown, ""
        return text[common_prefix(shown, text) :]


class _ByteStream:
    """Decodes the tokens of a byte-level vocabulary, each of which is a string of bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def unsettled(self) -> str:
        return self._utf8.getstate()[0].decode(errors="replace")


class _PieceStream:
    """Decodes the tokens of any other vocabulary, each of which is a string or, with byte fallback, one byte.

    A run of byte tokens is held until it ends: if any byte of it is invalid, the decoder of such vocabularies shows
    *every* byte of the run as U+FFFD, so a character is not certain before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the token before those held, so that they are not taken for a start of text
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        self._held.append(token)
        text = "" if self._tokenizer.is_byte(token) else self.unsettled()
        if text:
            self._before, self._held = [token], []
        return text

    def unsettled(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)


def common_prefix(left: str, right: str) -> int:
    """The length of the longest common prefix. Compares slices, since a loop over characters is slow."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: visible Latin-1 as itself, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _decoder_kinds(core: Core) -> Iterator[str]:
    def kinds(decoder: dict[str, Any]) -> Iterator[str]:
        if decoder["type"] == "Sequence":
            for part in decoder["decoders"]:
                yield from kinds(part)
        else:
            yield decoder["type"]

    if core.decoder is not None:
        yield from kinds(json.loads(core.decoder.__getstate__()))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content


def _read_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template: files of its own win over tokenizer_config.json, and that over chat_template.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (main := folder / "chat_template.jinja").exists():
        files["default"] = main
    if files:
        return _one_or_named({name: _read_text(path) for name, path in files.items()})
    source = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if source is None or isinstance(source, str):
        return source
    try:
        return _one_or_named({str(each["name"]): str(each["template"]) for each in source})
    except (KeyError, TypeError) as error:
        raise ModelError(f"chat_template in {folder} is neither a string nor a list of name and template") from error


def _one_or_named(templates: dict[str, str]) -> str | dict[str, str]:
    return templates["default"] if list(templates) == ["default"] else templates


def _content(token: Any) -> str | None:
    """The string of a special token, which configs give as such or as an object with flags."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: config[name] for name in _USUAL_NAMES if name in config}
    named |= {name: token for name, token in config.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    return {name: text for name, token in named.items() if (text := _content(token))}


def _unnamed_tokens(config: dict[str, Any]) -> list[str]:
    unnamed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return [text for token in unnamed if (text := _content(token))] if isinstance(unnamed, list) else []


def _numbered_tokens(config: dict[str, Any]) -> list[AddedToken]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    numbered = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    return [AddedToken(token["content"], **{k: token[k] for k in flags if k in token}) for _, token in numbered]


def _declare_special(core: Core, texts: Iterable[str]) -> None:
    added = {flags.content: flags for flags in core.get_added_tokens_decoder().values()}
    for text in texts:
        token = added.get(text) or AddedToken(text, special=True)
        token.special = True
        core.add_tokens([token])
