"""Replies as APIs tell of them: taken apart into what is said, what is thought and which tools are called."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.config import SamplingParams
from bough.engine.request import Output, Piece
from bough.engine.tool_formats import ToolCall
from bough.engine.tools import Dialect, Part, Reader, Said, Thought
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
) -> Reader:
    """What reads the reply to a prompt. Plain text, and text that has to follow a grammar, is taken as it is."""
    tokenizer = service.engine.tokenizer
    assert tokenizer is not None, "the prompt was made without a tokenizer"
    dialect = Dialect() if plain or params.grammar is not None else Dialect.of(tokenizer)
    return Reader(tokenizer, dialect, prompt.tokens, tools=tools, stop=params.stop)


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


def facts(output: Output) -> dict[str, Any]:
    """For the log."""
    usage = output.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reason": output.finish_reason,
    }
