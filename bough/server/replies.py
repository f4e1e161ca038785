"""Replies as APIs tell of them: taken apart into what is said, what is thought and which tools are called."""

from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bough.config import SamplingParams
from bough.engine.engine import Engine
from bough.engine.request import Output, Piece
from bough.engine.sampler import Logprobs
from bough.engine.tokenizer import Tokenizer
from bough.engine.tool_formats import ToolCall
from bough.engine.tool_grammar import reply_grammar
from bough.engine.tools import Dialect, Part, Reader, Said, Thought, begins_thinking
from bough.server.generation import QUIET, Generation, Prompt, Service


@dataclass(slots=True)
class Reply:
    """A whole reply."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def reader(
    service: Service,
    prompt: Prompt,
    params: SamplingParams,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    plain: bool = False,
    several: bool = True,
) -> Reader:
    """What reads the reply to a prompt. Plain text is taken as it is. `several`: more calls than one may be told."""
    tokenizer = _tokenizer(service)
    dialect = Dialect() if plain else Dialect.of(tokenizer)
    kind = Reader if several else FirstCall
    return kind(tokenizer, dialect, prompt.tokens, tools=tools, stop=params.stop)


class FirstCall(Reader):
    """Leaves out all calls but the first."""

    called = False

    def push(self, piece: Piece) -> list[Part]:
        return [part for part in super().push(piece) if self._is_told(part)]

    def finish(self) -> list[Part]:
        return [part for part in super().finish() if self._is_told(part)]

    def _is_told(self, part: Part) -> bool:
        again = self.called and isinstance(part, ToolCall)
        self.called = self.called or isinstance(part, ToolCall)
        return not again


def constrained(
    params: SamplingParams,
    service: Service,
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]] | None = None,
    forced: Sequence[Mapping[str, Any]] = (),
    *,
    several: bool = True,
) -> SamplingParams:
    """The sampling of a reply, which has to be a call of one of the `forced` tools, or several, if there are any.

    Where it has to be of a format instead, it may be calls of the `tools` as well. Its grammar leaves room for thinking
    that the prompt has begun.
    """
    if not forced and params.grammar is None:
        return params
    tokenizer = _tokenizer(service)
    dialect = Dialect.of(tokenizer)
    thinking = begins_thinking(tokenizer, dialect, prompt.tokens)
    offered = forced or (tools if dialect.calls else None) or ()
    if not offered and not thinking:
        return params
    answer = None if forced else params.grammar
    return replace(params, grammar=reply_grammar(tokenizer, offered, answer, several=several, thinking=thinking))


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.engine.tokenizer
    assert tokenizer is not None, "the prompt was made without a tokenizer"
    return tokenizer


def whole(read: Reader, output: Output) -> Reply:
    reply = Reply()
    for part in read.push(Piece(output.text, output.tokens)) + read.finish():
        if isinstance(part, Said):
            reply.text += part.text
        elif isinstance(part, Thought):
            reply.thinking += part.text
        else:
            reply.calls.append(part)
    return reply


async def parts(generation: Generation, read: Reader) -> AsyncIterator[Part | None]:
    """The parts of a reply as they become certain; None when there is nothing to tell for a while."""
    async for _, piece in generation:
        if piece is QUIET:
            yield None
            continue
        for part in read.finish() if piece is None else read.push(piece):
            yield part


def thinking_tokens(service: Service, tokens: Sequence[int]) -> int:
    """How many tokens of a reply that begins with thinking this takes, marks included."""
    tokenizer = _tokenizer(service)
    dialect = Dialect.of(tokenizer)
    assert dialect.thinking is not None, "there was thinking in the reply"
    close = dialect.thinking[1]
    return bisect_left(
        range(len(tokens)), True, key=lambda count: close in tokenizer.decode(tokens[:count], skip_special=False)
    )


def told_logprobs(
    engine: Engine, tokens: Iterable[int], logprobs: Iterable[Logprobs], *, ignore_eos: bool
) -> list[tuple[int, Logprobs]]:
    """Tokens with their logprobs, without the one that ends the reply, which is no part of its text."""
    ends = frozenset() if ignore_eos else engine.end_tokens
    return [(token, each) for token, each in zip(tokens, logprobs, strict=True) if token not in ends]


def spell(engine: Engine, token: int) -> bytes:
    return engine.tokenizer.token_bytes(token) if engine.tokenizer else str(token).encode()


def entries(engine: Engine, told: Iterable[tuple[int, Logprobs]]) -> list[dict[str, Any]]:
    """Logprobs as OpenAI's APIs for chats tell of them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelt = spell(engine, token)
        return {"token": spelt.decode(errors="replace"), "logprob": logprob, "bytes": list(spelt)}

    return [entry(token, each.chosen) | {"top_logprobs": [entry(*other) for other in each.top]} for token, each in told]


def facts(output: Output) -> dict[str, Any]:
    """For the log."""
    usage = output.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reason": output.finish_reason,
    }
