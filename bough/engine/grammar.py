"""Grammars: which tokens may come next, so that the text of a request is what its Grammar says.

Grammars  reads the grammars of requests for one model's vocabulary, with llguidance.
Matcher   how far the text of one request has got in its grammar.
masks     what may follow texts, and what may follow them after each token of a draft.

What may follow depends on the tokens written and on nothing else: a matcher only ever takes tokens that stand. Drafts
are tried on copies of it, since llguidance 1.9.1, told to take tokens back, may go on as if some were still there.

An end token may come wherever the text is one that the grammar allows as a whole; with ignore_eos, only where nothing
else may. A text that nothing else can follow ends there, with or without an end token.

This module knows token ids and their bytes. It does not know logits, states, or who writes.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from bough.config import Grammar, SamplingParams
from bough.engine.tokenizer import Tokenizer
from bough.errors import OptionError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

Result = TypeVar("Result")
KEPT = 64  # grammars that are not read again
LONGEST = 1 << 18  # characters of a grammar
# llguidance descends into a grammar on the stack, some kilobytes a rule, and without room it ends the process. This
# is enough for as many rules as LONGEST characters can hold; what is not used of it takes no memory.
STACK_BYTES = 512 << 20
# Unlimited white space is a trap that small models do not get out of.
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}


class Grammars:
    """Reads grammars for one vocabulary. Nothing is loaded or built before the first; usable from any thread."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer, self._size = tokenizer, vocabulary
        self.end_tokens = frozenset(token for token in end_tokens if token < vocabulary)
        self._words: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._gate = threading.Lock()
        self._read = lru_cache(KEPT)(self._compile)

    def check(self, grammar: Grammar) -> None:
        """Raises OptionError if no request could be made with this grammar."""
        self._read(grammar)

    def begin(self, params: SamplingParams) -> "Matcher | None":
        """The matcher of a new request, or None when it may write anything."""
        return Matcher(self, self._read(params.grammar).deep_copy(), params.ignore_eos) if params.grammar else None

    @property
    def executor(self) -> "LLExecutor":
        """The threads that masks are computed in."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor

    @property
    def mask_bytes(self) -> int:
        return (self._size + 31) // 32 * 4

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        words = self._vocabulary()
        if len(grammar.source) > LONGEST:
            raise OptionError(f"the grammar has {len(grammar.source)} characters; {LONGEST} are allowed, shorten it")
        try:
            core = _with_large_stack(lambda: _matcher(words, grammar))
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        if core.is_error():
            raise _refused(grammar, core.get_error())
        return core

    def _vocabulary(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise OptionError("grammars need the llguidance package: pip install 'bough[grammar]'") from None
        if self._tokenizer is None:
            raise OptionError("grammars need a tokenizer, and the model has none")
        if not self.end_tokens:
            raise OptionError("grammars need an end token, and the model names none (eos_token_id in its config.json)")
        with self._gate:
            if self._words is None:
                words = Words(self._tokenizer, self._size, self.end_tokens)
                self._words = words.greedy = LLTokenizer(TokenizerWrapper(words), eos_token=sorted(self.end_tokens))
            return self._words


class Words:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]  # without bytes: never allowed
        self.special_token_ids = sorted(token for token in tokenizer.special_ids | end_tokens if token < size)
        self.eos_token_id, self.bos_token_id = min(end_tokens), None
        self.greedy: LLTokenizer | None = None  # tells the longest tokens that a text consists of

    def __call__(self, text: str) -> list[int]:
        """The tokens that a model would write for a text which a grammar leaves no choice about."""
        ids, _ = self._tokenizer.encode_split(text, follows=True)
        ours = not any(token >= len(self.tokens) or token in self.special_token_ids for token in ids)
        if ours and b"".join(self.tokens[token] for token in ids) == text.encode():
            return ids
        assert self.greedy is not None
        return self.greedy.greedy_tokenize(text)  # it has the name of a special token in it, or is normalised


class Matcher:
    """How far the text of one request has got in its grammar."""

    def __init__(self, grammars: Grammars, core: "LLMatcher", ignore_eos: bool) -> None:
        self.grammars, self.core, self.ignore_eos = grammars, core, ignore_eos
        self.complete = core.is_stopped()  # nothing can follow
        self.fault: tuple[int, str] | None = None  # after how many more tokens nobody can tell what may follow, and why

    def take(self, token: int) -> bool:
        """The text grows by a token. False: the grammar does not allow it, and the request cannot go on."""
        if self.fault is not None:
            ahead, why = self.fault
            if not ahead:
                return False
            self.fault = ahead - 1, why
        if token in self.grammars.end_tokens:
            self.complete = True
            return self.core.is_accepting() or self.core.try_consume_tokens([token]) == 1
        taken = self.core.consume_token(token)
        self.complete = self.core.is_stopped()
        return taken

    @property
    def problem(self) -> str:
        """Why no token could be taken."""
        return self.fault[1] if self.fault is not None else _problem(self.core)


def masks(rows: Sequence[tuple[Matcher | None, Sequence[int]]]) -> list[Tensor | None]:
    """For each text with its draft of k tokens: what may follow it and each of them, uint8 [1 + k, bytes], as bits.

    Token t is bit t % 8 of byte t // 8. What follows a token that the grammar refuses is not looked at by anybody, and
    anything is allowed there. None for texts that may be anything.
    """
    constrained = [(matcher, draft) for matcher, draft in rows if matcher is not None]
    if not constrained:
        return [None] * len(rows)
    grammars = constrained[0][0].grammars
    ends = list(accumulate(1 + len(draft) for _, draft in constrained))
    bits = torch.full((ends[-1], grammars.mask_bytes), 255, dtype=torch.uint8)
    placed = [(*row, end - len(row[1]) - 1) for row, end in zip(constrained, ends, strict=True)]
    _fill(bits, placed)
    for matcher, draft, at in placed:
        if matcher.ignore_eos:
            _forbid_ends(bits[at : at + len(draft) + 1], grammars.end_tokens)
    found = iter([bits[at : at + len(draft) + 1] for _, draft, at in placed])
    return [None if matcher is None else next(found) for matcher, _ in rows]


def _fill(bits: Tensor, rows: Sequence[tuple[Matcher, Sequence[int], int]]) -> None:
    """Write the masks of texts and their drafts into bits, from a row on; all texts at once, depth by depth."""
    going = [(matcher, matcher.core.deep_copy() if draft else matcher.core, draft, at) for matcher, draft, at in rows]
    depth = 0
    while going:
        asked = [(core, at + depth) for _, core, _, at in going]
        going[0][0].grammars.executor.unsafe_compute_mask_ptr(asked, bits.data_ptr(), bits.shape[1], bits.shape[0])
        further = []
        for matcher, core, draft, at in going:
            matcher.fault = (depth, _problem(core)) if core.is_error() else None
            # Nothing follows an end token, nor a text that is complete.
            tried = draft[depth : depth + 1] if not core.is_stopped() else ()
            if tried and tried[0] not in matcher.grammars.end_tokens and core.try_consume_tokens(list(tried)) == 1:
                further.append((matcher, core, draft, at))
        going, depth = further, depth + 1


def _forbid_ends(mask: Tensor, end_tokens: frozenset[int]) -> None:
    """Allow end tokens in those rows alone that allow nothing else."""
    others = mask.clone()
    for token in end_tokens:
        others[:, token // 8] &= ~(1 << token % 8) & 0xFF
    mask.copy_(torch.where((others != 0).any(-1, keepdim=True), others, mask))


def _matcher(words: "LLTokenizer", grammar: Grammar) -> "LLMatcher":
    """Raises ValueError, or gives a matcher in error, if the grammar is wrong."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        options = JSON_OPTIONS if grammar.source.startswith("{") else None
        source = LLMatcher.grammar_from_json_schema(grammar.source, options)
    elif grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(grammar.source)
    else:
        source = LLMatcher.grammar_from_lark(grammar.source)
    return LLMatcher(words, source, log_level=0)


def _with_large_stack(work: Callable[[], Result]) -> Result:
    """What some work gives that may need more of the stack than threads have."""
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="bough-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    for error in errors:
        raise error
    return results[0]


def _refused(grammar: Grammar, why: str) -> OptionError:
    kind = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}[grammar.kind]
    return OptionError(f"the {kind} cannot be used ({_in_short(why)}); correct it")


def _problem(core: "LLMatcher") -> str:
    why = _in_short(core.get_error())
    if why == "NoExtensionBias":
        return "the grammar asks for something that no token of the model's vocabulary can write; change it"
    return f"the grammar could not be followed any further ({why}); simplify it"


def _in_short(message: str) -> str:
    """A message of llguidance without what follows it about the inside of its parser."""
    return " ".join(message.partition("<state>")[0].split())[:400]
