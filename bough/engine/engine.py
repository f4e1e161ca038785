"""Engine: a loaded model, the memory for its state, and the ways to ask it for text."""

import operator
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from bough.config import CacheConfig, SamplingParams, is_int, require
from bough.draft.load import DraftOption, drafter_for
from bough.engine import garbage
from bough.engine.caching import Cache, draft_cache, prefix_cache
from bough.engine.chat import Chat
from bough.engine.drafting import Drafting
from bough.engine.grammar import Grammars
from bough.engine.load import Loaded, load
from bough.engine.loop import Loop
from bough.engine.measure import Fit, reserve
from bough.engine.memory import pools
from bough.engine.request import Handle, Output, Piece, Request, TokenIds
from bough.engine.runner import Runner
from bough.engine.sampler import Biases, TokenCounts, resolve_seed
from bough.engine.sequence import Sequence as Running
from bough.errors import BadPrompt, EmptyPrompt, OptionError, PoolFull, PromptTooLong, RequestError, TokenOutOfRange
from bough.models.weights import Progress
from bough.state import capacity
from bough.state.layout import Layout

Prompt = str | Sequence[int]  # or an array or tensor of ints: whatever has tolist()
Result = TypeVar("Result")


class Engine:
    """A model ready to answer, from any thread. `close()` it when done, or use it as a context manager."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        cache: CacheConfig | None = None,
        context: int | None = None,
        max_running: int | None = None,
        step_tokens: int | None = None,
        draft: DraftOption = "auto",
        progress: Progress | None = None,
    ) -> None:
        self.name, self.model, self.tokenizer = loaded.name, loaded.model, loaded.tokenizer
        self.end_tokens, self.defaults, self.about = loaded.end_tokens, loaded.sampling, loaded.about
        suggested = min(loaded.about.context or self.model.context, self.model.context)
        self.context = _at_least_one("context", context) or suggested
        if self.context > self.model.context:
            raise OptionError(f"context {self.context} is more than the {self.model.context} tokens the model can read")
        # Larger steps gain nothing on a CPU.
        self.step_tokens = _at_least_one("step_tokens", step_tokens) or (
            512 if self.model.device.type == "cpu" else 8192
        )
        cache = cache or CacheConfig()
        if draft == "auto" and loaded.path is not None:
            draft = loaded.about.draft_beside(loaded.path) or draft
        drafter = drafter_for(draft, self.model, path=loaded.path, progress=progress)
        pool, draft_pool, last_layer = pools(
            self.model,
            drafter,
            cache,
            context=self.context,
            step_tokens=self.step_tokens,
            max_running=_at_least_one("max_running", max_running),
        )
        self.max_running = pool.max_running
        self._longest = capacity.tokens_that_fit(
            [each.layout for each in pool.arena.pools], pool.slabs, self.step_tokens, self.max_running, self.context
        )
        self._runner = Runner(self.model, pool, last_layer, self.context)
        prefixes = prefix_cache(cache, loaded, pool)
        self.drafting = Drafting(drafter, self._runner, draft_cache(prefixes, draft_pool))
        self._loop = Loop(
            self._runner, prefixes, self.drafting, max_running=self.max_running, step_tokens=self.step_tokens
        )
        self.cache = Cache(self, prefixes)
        self._grammars = Grammars(self.tokenizer, self.model.vocab_size, self.end_tokens)
        garbage.opened(self)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        cache: CacheConfig | None = None,
        context: int | None = None,
        max_running: int | None = None,
        draft: DraftOption = "auto",
        name: str | None = None,
        progress: Progress | None = None,
    ) -> "Engine":
        """Load a Hugging Face folder or a GGUF file. `progress` is told (tensors read, tensors in all).

        `draft`: "auto" (what the model ships, else ngram), "mtp", "assistant", "ngram", the path of a draft model, or
        None.
        """
        for option, value in (("context", context), ("max_running", max_running)):
            _at_least_one(option, value)  # before the work of loading
        path = Path(os.path.expanduser(model))
        loaded = load(path, name=name, dtype=dtype, device=_device(device), progress=progress)
        return cls(loaded, cache=cache, context=context, max_running=max_running, draft=draft, progress=progress)

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None) -> Output: ...
    @overload
    def generate(self, prompt: list[int], params: SamplingParams | None = None) -> Output: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], params: SamplingParams | None = None) -> list[Output]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Output | list[Output]:
        """Continue a prompt (text or token ids), or several at once; waits for the end."""
        listed = _listed(prompt)
        one = isinstance(listed, str) or not (listed and _is_prompt(listed[0]))
        prompts = [listed] if one else listed
        requests = [self._request(each, params) for each in prompts]  # refused before any is started
        handles = [self._start(request) for request in requests]
        try:
            outputs = [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return outputs[0] if one else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Continue a prompt piece by piece. Closing the iterator cancels."""
        handle = self.submit(prompt, params)
        try:
            yield from handle
        finally:
            handle.cancel()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        boundaries: Sequence[int] = (),
        marks: Sequence[int] = (),
    ) -> Handle:
        """Start on a prompt and return at once.

        Others are likely to branch off from it at the lengths in `boundaries`, and are sure to resume at `marks`.
        """
        request = replace(self._request(prompt, params), boundaries=tuple(boundaries), marks=tuple(marks))
        return self._start(request)

    def score(self, prompt: Prompt) -> list[float]:
        """The logprob of each token given those before it: one less than there are tokens, as the first has none."""
        tokens = self.tokens(prompt)
        request = Request(tokens, SamplingParams(max_tokens=0, temperature=0), seed=0, score=True)
        return self._start(request).result().scores

    def chat(self, system: str | None = None, **options: Any) -> Chat:
        """A conversation. Options: tools, params, and whatever variables the chat template reads.

        Without a system prompt it has the one that was stored with the model, if there is one.
        """
        return Chat(self, system=self.about.system if system is None else system, **options)

    def tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; give token ids instead of text")
        return self.tokenizer.encode(text)

    def reserve(self) -> Fit:
        """Measure the peak of activations with made-up tokens, and tell how many tokens and sequences fit."""
        return reserve(self._runner, step_tokens=self.step_tokens, context=self.context, max_running=self.max_running)

    def check(self) -> None:
        """Assert that no memory is lost, on any tier."""
        self.call(self._check)

    def _check(self) -> None:
        self._loop.cache.check()
        if self.drafting.cache is not None:
            self.drafting.cache.check()

    def call(self, ask: Callable[[], Result]) -> Result:
        """Run something in the engine's thread, between two steps, and wait for what it gives."""
        return self._loop.call(ask)

    @property
    def busy(self) -> tuple[int, int]:
        """How many requests wait, and how many run."""
        return self._loop.load

    @property
    def layout(self) -> Layout:
        """How the state of a sequence is laid out in memory."""
        return self._runner.pool.layout

    @property
    def used_bytes(self) -> int:
        """Bytes of state in use."""
        return self._runner.pool.used_bytes

    def close(self) -> None:
        self._loop.close()
        garbage.closed(self)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tokens(self, prompt: object) -> TokenIds:
        """The prompt as token ids, known to be ones the model can read and the memory can hold."""
        listed = _listed(prompt)
        tokens = TokenIds(self.tokenize(listed)) if isinstance(listed, str) else _ids(listed)
        if not tokens:
            raise EmptyPrompt("the prompt is empty; give at least one token")
        self._expect_known(tokens)
        if len(tokens) > self.context:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, the context {self.context}; shorten it"
                + (f" or load with context={len(tokens)} or more" if len(tokens) <= self.model.context else "")
            )
        if len(tokens) > self._longest:
            raise PoolFull(
                f"the prompt has {len(tokens)} tokens and the memory for state holds {self._longest};"
                " shorten it or give the cache more memory (CacheConfig.device_bytes)"
            )
        return tokens

    def _expect_known(self, tokens: TokenIds) -> None:
        try:
            if tokens.symbols.min() >= 0 and tokens.symbols.max() < self.model.vocab_size:
                return
        except OverflowError:  # of one that no vocabulary has
            pass
        wrong = next(token for token in tokens if not 0 <= token < self.model.vocab_size)
        raise TokenOutOfRange(f"token {wrong} is not in the vocabulary of {self.model.vocab_size} tokens")

    def _request(self, prompt: object, params: SamplingParams | None) -> Request:
        params = self.defaults if params is None else params
        require(isinstance(params, SamplingParams), "params", params, "SamplingParams")
        if params.stop and self.tokenizer is None:
            raise OptionError("stop strings need a tokenizer, and the model has none")
        if params.logit_bias:
            self._expect_known(TokenIds(dict(params.logit_bias)))
        if params.grammar is not None:
            self._grammars.check(params.grammar)
        return Request(self.tokens(prompt), params, resolve_seed(params))

    def _start(self, request: Request) -> Handle:
        counts = TokenCounts.wanted_by(request.params, request.prompt, self.model.vocab_size, self.model.device)
        return self._loop.submit(
            Running(
                Handle(request, has_text=self.tokenizer is not None),
                context=self.context,
                end_tokens=self.end_tokens,
                tokenizer=self.tokenizer,
                counts=counts,
                biases=Biases.wanted_by(request.params, self.model.device),
                matcher=self._grammars.begin(request.params),
            )
        )


def _listed(prompt: object) -> str | Sequence[object]:
    """Text as it is; tokens, or several prompts, as a sequence. Arrays and tensors become lists."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise BadPrompt("a prompt is text or token ids, not bytes; decode them to text first")
    if isinstance(prompt, Sequence):  # text is one too
        return prompt
    if hasattr(prompt, "tolist"):
        return _listed(prompt.tolist())
    raise BadPrompt(f"a prompt is text or a list of token ids, not {reprlib.repr(prompt)}")


def _is_prompt(value: object) -> bool:
    """Whether this is one of several prompts, rather than a token: arrays of no dimension are tokens."""
    return isinstance(value.tolist() if hasattr(value, "tolist") else value, Sequence)


def _ids(values: Sequence[Any]) -> TokenIds:
    if isinstance(values, TokenIds):
        return values
    plain = list(map(type, values)).count(int) == len(values)  # as nearly always: then no call for each of them
    return TokenIds(values if plain else map(_token, values))


def _token(value: Any) -> int:
    try:
        token = operator.index(value)
    except TypeError:
        token = None
    if token is None or isinstance(value, bool):
        raise TokenOutOfRange(f"{reprlib.repr(value)} is not a token id; prompts are text or lists of ints")
    return token


def _at_least_one(name: str, value: int | None) -> int | None:
    require(value is None or is_int(value, 1), name, value, "a whole number, 1 or more")
    return value


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {name!r} cannot be used ({str(error).splitlines()[0]}); try cpu") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where kernels are launched
    return device
