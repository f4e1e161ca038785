"""Anthropic's API: /v1/messages and /v1/messages/count_tokens, as its clients expect them."""

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from bough.config import SamplingParams
from bough.engine.request import Output
from bough.engine.tokenizer import Detokenizer
from bough.engine.tool_formats import ToolCall
from bough.engine.tools import Part, Reader, Said, Thought
from bough.server import anthropic_requests as asked
from bough.server import replies
from bough.server.api import Api, Call, Endpoint, Json, Stream, server_sent
from bough.server.errors import ApiError
from bough.server.generation import Generation, Prompt

EVENTS = "text/event-stream"
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def messages(call: Call) -> Response:
    body, service = call.body, call.service
    service.require_model(body.get("model"))
    params = asked.sampling(body, service.engine.defaults, call.salt())
    chat = asked.chat(body)
    forced, several = asked.forced_tools(body, chat), asked.several_calls(body)
    prompt, marked = await asked.prompt(chat, body, service)
    params = replies.constrained(params, service, prompt, chat.functions(), forced, several=several)
    read = replies.reader(service, prompt, params, chat.functions(), several=several)
    answer = Answer(call, prompt, marked, params, read)
    generation = await service.start([(prompt, params)])
    if body.get("stream"):
        return Stream(generation, answer.events(generation), EVENTS, lambda told: _event(error(told), "error"))
    [output] = await call.outputs(generation)
    return Json(answer.whole(output))


async def count_tokens(call: Call) -> Response:
    call.service.require_model(call.body.get("model"))
    prompt, _ = await asked.prompt(asked.chat(call.body), call.body, call.service)
    return Json({"input_tokens": len(prompt.tokens)})


class Answer:
    """One message, whole or as events."""

    def __init__(self, call: Call, prompt: Prompt, marked: int, params: SamplingParams, read: Reader) -> None:
        self.call, self.prompt, self.marked, self.params, self.read = call, prompt, marked, params, read
        self.called = False  # whether a tool was
        self.head: dict[str, Any] = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": call.service.name,
        }

    def whole(self, output: Output) -> dict[str, Any]:
        reply = replies.whole(self.read, output)
        content: list[dict[str, Any]] = []
        if reply.thinking:
            content.append(self.block(Thought(reply.thinking)))
        if reply.text:
            content.append(self.block(Said(reply.text)))
        content += [self.block(each) for each in reply.calls]
        return self.head | {"content": content} | self.ending(output) | {"usage": self.usage(output)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        usage = _usage(len(self.prompt.tokens), 0, 0, 0)  # what was cached is not known yet
        start = self.head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": start})
        yield _event({"type": "ping"})
        index, kind = -1, None  # of the block that is open
        async for part in replies.parts(generation, self.read):
            if part is None:
                yield _event({"type": "ping"})
                continue
            if type(part) is not kind or isinstance(part, ToolCall):
                if kind is not None:
                    yield _event({"type": "content_block_stop", "index": index})
                index, kind = index + 1, type(part)
                block = self.block(part) | EMPTY[kind]
                yield _event({"type": "content_block_start", "index": index, "content_block": block})
            yield _event({"type": "content_block_delta", "index": index, "delta": _delta(part)})
        if kind is not None:
            yield _event({"type": "content_block_stop", "index": index})
        output = generation.output()
        yield _event({"type": "message_delta", "delta": self.ending(output), "usage": self.usage(output)})
        yield _event({"type": "message_stop"})

    def block(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Said):
            return {"type": "text", "text": part.text}
        if isinstance(part, Thought):
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        self.called = True
        return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": part.arguments}

    def ending(self, output: Output) -> dict[str, Any]:
        """Why the message ended."""
        stop = self.stopped_by(output)
        if self.called:
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        else:
            reason = "end_turn" if output.finish_reason == "stop" else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def stopped_by(self, output: Output) -> str | None:
        """The stop sequence that ended the text: what the tokens go on with after it."""
        tokenizer = self.call.service.engine.tokenizer
        if not self.params.stop or output.finish_reason != "stop" or tokenizer is None:
            return None
        stream = Detokenizer(tokenizer, self.prompt.tokens)
        rest = (stream.push(output.tokens) + stream.finish())[len(output.text) :]
        return next((stop for stop in self.params.stop if rest.startswith(stop)), None)

    def usage(self, output: Output) -> dict[str, Any]:
        """What it cost. Tokens up to the last mark that were not in the cache are there now."""
        self.call.context.facts |= replies.facts(output)
        prompt, cached = output.usage.prompt_tokens, output.usage.cached_tokens
        return _usage(prompt, cached, max(0, self.marked - cached), output.usage.completion_tokens)


EMPTY: dict[type[Part], dict[str, Any]] = {Said: {"text": ""}, Thought: {"thinking": ""}, ToolCall: {"input": {}}}


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Said):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Thought):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": json.dumps(part.arguments)}


def _usage(prompt: int, read: int, created: int, written: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - read - created,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "output_tokens": written,
    }


def _event(told: dict[str, Any], name: str | None = None) -> bytes:
    return server_sent(told, name or told["type"])


def error(told: ApiError) -> dict[str, Any]:
    kind = ERRORS.get(told.status, "api_error" if told.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": told.message}}


API = Api(
    "anthropic",
    ("/v1/messages",),
    error,
    (
        Endpoint("POST", "/v1/messages", messages, "The next message of a conversation", asked.MESSAGES, stream=EVENTS),
        Endpoint("POST", "/v1/messages/count_tokens", count_tokens, "How long a prompt is", asked.COUNT),
    ),
)
