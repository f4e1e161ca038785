"""The tokenizer in the metadata of a GGUF file, as plain data and a `tokenizers.Tokenizer`.

Two kinds belong to the models that Bough runs: "gpt2" is byte-level BPE, with its merges and the name of the way it
cuts text into words; "llama" is the BPE of sentencepiece, with a score for each piece instead of merges.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bough.errors import ModelError, expecting_tokenizer
from bough.models.gguf_header import Metadata

if TYPE_CHECKING:
    from bough.models.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "eot_token": "eot_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class Words(NamedTuple):
    """How byte-level BPE cuts text into words, in which alone it then merges."""

    patterns: Sequence[str]
    composed: bool = False  # Unicode is brought to its composed form first
    whole: bool = False  # a word that is a token is taken whole, even where merges would not lead to it


def _modern(number: str, letter: str = r"\p{L}") -> str:
    """The pattern of Llama 3 and of Qwen, which differ in what they do to digits and to marks."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|"
        + number
        + rf"| ?[^\s{letter}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {
    "gpt-2": Words([GPT2]),
    "smollm": Words([r"\p{N}", GPT2]),
    "llama-bpe": Words([_modern(r"\p{N}{1,3}")], whole=True),
    "lfm2": Words([_modern(r"\p{N}{1,3}")], whole=True),
    "tekken": Words([TEKKEN], whole=True),
    "qwen2": Words([_modern(r"\p{N}")], composed=True),
    "qwen35": Words([_modern(r"\p{N}", r"\p{L}\p{M}")], composed=True),
}


def gguf_tokenizer(file: "GGUFFile") -> tuple[Tokenizer, dict[str, str], str | None, bool | None]:
    """The tokenizer, its special tokens by name, its chat template, and whether a prompt begins with BOS.

    A way of cutting words that is not in WORDS is taken for GPT-2's: such text is still encoded without loss, though
    perhaps into other tokens than the model was trained on.
    """
    vocabulary = _Vocabulary(file.metadata.under("tokenizer.ggml."), file.where)
    with expecting_tokenizer(f"{file.where} has no usable tokenizer"):
        core, begins = vocabulary.core()
        core.add_tokens(vocabulary.added())
    stated = vocabulary.metadata.get("add_bos_token", bool)
    add_bos = (begins if stated is None else stated) and "bos_token" in vocabulary.special
    return core, vocabulary.special, file.metadata.get("tokenizer.chat_template", str), add_bos


class _Vocabulary:
    """The tokens of a file with their types."""

    def __init__(self, metadata: Metadata, where: str) -> None:
        self.metadata, self.where = metadata, where
        self.tokens: list[str] = metadata.need("tokens", list)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.special = {name: self._named(key) for name, key in NAMED.items() if key in metadata}
        if "token_type" in metadata:
            self.types = self.numbers("token_type")
        else:
            self.types = [CONTROL if token in self.special.values() else NORMAL for token in self.tokens]

    def _named(self, key: str) -> str:
        token = self.metadata.need(key, int)
        if not 0 <= token < len(self.tokens):
            raise ModelError(f"{self.where} has no token {token}, and names it as {key}; download it again")
        return self.tokens[token]

    def numbers(self, key: str) -> list[float]:
        """A number for each token."""
        values = self.metadata.need(key, np.ndarray)
        if len(values) != len(self.tokens):
            raise ModelError(
                f"{self.where} has {len(values)} entries in tokenizer.ggml.{key} for {len(self.tokens)} tokens;"
                " it is damaged: download it again"
            )
        return values.tolist()

    def added(self) -> list[AddedToken]:
        """Tokens that are found in text as they stand, before any merging. Those of control are not shown."""
        return [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def core(self) -> tuple[Tokenizer, bool]:
        """The tokenizer without its added tokens, and whether its kind puts BOS in front when the file is silent."""
        match model := self.metadata.need("model", str):
            case "gpt2":
                words = WORDS.get(self.metadata.get("pre", str) or "gpt-2", WORDS["gpt-2"])
                return self._byte_level(words), words.whole
            case "llama":
                return self._sentencepiece(), True
        raise ModelError(
            f"{self.where} has a tokenizer of type {model!r}, and Bough reads gpt2 and llama;"
            " give a folder in the Hugging Face layout instead"
        )

    def _byte_level(self, words: Words) -> Tokenizer:
        merges = [(left, right) for left, _, right in (m.partition(" ") for m in self.metadata.need("merges", list))]
        core = Tokenizer(models.BPE(self.ids, merges, ignore_merges=words.whole))
        if words.composed:
            core.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
        core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
        core.decoder = decoders.ByteLevel()
        return core

    def _sentencepiece(self) -> Tokenizer:
        unknown = self.special.get("unk_token")
        core = Tokenizer(models.BPE(self.ids, self._merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True))
        led = self.metadata.get("add_space_prefix", bool) is not False  # text begins with a space of its own
        core.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend("▁")] if led else []), normalizers.Replace(" ", "▁")]
        )
        texts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*texts, decoders.Strip(" ", 1, 0)] if led else texts)
        return core

    def _merges(self) -> list[tuple[str, str]]:
        """All pairs of pieces that make a piece, best result first.

        Sentencepiece joins the neighbours with the best result, the leftmost of equals. Two ways to make the same piece
        come one after the other here; that is no difference unless they would take the same neighbour from each other.
        """
        scores, kinds = self.numbers("scores"), zip(self.tokens, self.types, strict=True)
        pieces = {token: -scores[self.ids[token]] for token, kind in kinds if kind == NORMAL}
        return [
            (piece[:cut], piece[cut:])
            for piece in sorted(pieces, key=pieces.__getitem__)
            for cut in range(1, len(piece))
            if piece[:cut] in pieces and piece[cut:] in pieces
        ]
