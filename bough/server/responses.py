"""OpenAI's Responses API: /v1/responses, as its clients and the agents built on them expect it. Nothing is stored."""

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.responses import Response

from bough.config import SamplingParams
from bough.engine.request import Output, Piece
from bough.engine.sampler import Logprobs
from bough.engine.tool_formats import ToolCall
from bough.engine.tools import Part, Reader, Said, Thought
from bough.server import replies
from bough.server import responses_requests as asked
from bough.server.api import Call, Endpoint, Json, Stream, server_sent
from bough.server.errors import ApiError
from bough.server.generation import QUIET, Generation

ALIVE = b": still working\n\n"
EVENTS = "text/event-stream"

Item = dict[str, Any]


async def respond(call: Call) -> Response:
    body, service = call.body, call.service
    service.require_model(body.get("model"))
    asked.require_stateless(body)
    engine, tools = service.engine, asked.tools(body)
    salt = call.salt(body.get("cache_salt"))
    params = asked.sampling(body, engine.defaults, salt, service.most_tokens, tools)
    prompt = await service.chat_prompt(asked.messages(body), tools.told or None, asked.template_options(body))
    params = replies.constrained(params, service, prompt, tools.told, tools.forced, several=tools.several)
    read = replies.reader(service, prompt, params, tools.told, several=tools.several)
    generation = await service.start([(prompt, params)])
    answer = Answer(call, params, tools, read)
    if body.get("stream"):
        return Stream(generation, answer.events(generation), EVENTS, answer.broken)
    [output] = await call.outputs(generation)
    return Json(answer.whole(output))


async def stored(call: Call) -> Response:
    name = call.request.path_params["response_id"]
    message = f"there is no response {name!r}: none is stored here; send the whole conversation with each request"
    raise ApiError(404, message, code="not_found", param="response_id")


class Answer:
    """One response, whole or as events. The last item of its output may be open: more text of the kind is coming."""

    def __init__(self, call: Call, params: SamplingParams, tools: asked.Tools, read: Reader) -> None:
        self.call, self.tools, self.read = call, tools, read
        self.response = _begun(call, params)
        self.output: list[Item] = self.response["output"]
        self.kind: type[Said] | type[Thought] | None = None  # of the item that is open
        self.texts: list[str] = []  # that are in it
        self.tokens: list[int] = []  # that have come
        self.logprobs: list[Logprobs] = []  # of each, when asked for
        self.listed = 0  # up to where they were told of
        self.numbers = itertools.count()

    def whole(self, output: Output) -> dict[str, Any]:
        parts = self._taken(Piece(output.text, output.tokens, output.logprobs)) + self.read.finish()
        for part in parts:
            list(self._told(part))  # what the events tell of is the output
        list(self._end(output))
        return self.response

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)
        async for _, piece in generation:
            if piece is QUIET:
                yield ALIVE
                continue
            for part in self.read.finish() if piece is None else self._taken(piece):
                for event in self._told(part):
                    yield event
        for event in self._end(generation.output()):
            yield event

    def broken(self, told: ApiError) -> bytes:
        """The last events of a stream that cannot go on. Some clients know one of them, some the other."""
        self._settle("incomplete")
        code = "server_error" if told.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": told.message}}
        error = self._event("error", code=told.code or code, message=told.message, param=told.param)
        return error + self._event("response.failed", response=self.response)

    def _taken(self, piece: Piece) -> list[Part]:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        return self.read.push(piece)

    def _told(self, part: Part) -> Iterator[bytes]:
        """Put a part of the reply into the output."""
        if isinstance(part, ToolCall):
            yield from self._close("completed")
            yield from self._called(part)
            return
        if type(part) is not self.kind:
            yield from self._close("completed")
            yield from self._open(type(part))
        self.texts.append(part.text)
        if isinstance(part, Said):
            logprobs = self._more_logprobs()
            yield self._event("response.output_text.delta", **self._inside(), delta=part.text, logprobs=logprobs)
        else:
            yield self._event("response.reasoning_text.delta", **self._inside(), delta=part.text)

    def _open(self, kind: type[Said] | type[Thought]) -> Iterator[bytes]:
        item: Item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        part: Item = {"type": "reasoning_text", "text": ""}
        if kind is Said:
            item = {"id": _id("msg"), "type": "message", "role": "assistant", "content": [], "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._added(item)
        item["content"].append(part)
        self.kind, self.texts = kind, []
        yield self._event("response.content_part.added", **self._inside(), part=part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the item that is open, if one is."""
        kind = self.kind
        if kind is None:
            return
        part = self._settle(status)
        told = self._inside() | {"text": part["text"]}
        if kind is Said:
            yield self._event("response.output_text.done", **told, logprobs=part["logprobs"])
        else:
            yield self._event("response.reasoning_text.done", **told)
        yield self._event("response.content_part.done", **self._inside(), part=part)
        yield self._done()

    def _settle(self, status: str) -> Item:
        """Write down what has come of the item that is open."""
        if self.kind is None:
            return {}
        part: Item = self.output[-1]["content"][0]
        part["text"] = "".join(self.texts)
        if self.kind is Said:
            self._more_logprobs()
        self.output[-1]["status"] = status
        self.kind = None
        return part

    def _called(self, call: ToolCall) -> Iterator[bytes]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        namespace, name = self.tools.places.get(call.name, (None, call.name))
        item: Item = {"id": _id("fc"), "type": "function_call", "call_id": _id("call"), "name": name}
        item |= {"namespace": namespace} if namespace else {}
        item |= {"arguments": "", "status": "in_progress"}
        yield self._added(item)
        yield self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)
        yield self._event("response.function_call_arguments.done", **self._place(), arguments=arguments)
        item |= {"arguments": arguments, "status": "completed"}
        yield self._done()

    def _end(self, output: Output) -> Iterator[bytes]:
        ended = output.finish_reason == "stop"
        status = "completed" if ended else "incomplete"
        if ended and not any(item["type"] in ("message", "function_call") for item in self.output):
            yield from self._close(status)
            yield from self._open(Said)  # which clients look for, even if nothing was said
        yield from self._close(status)
        self.response |= {"status": status, "usage": self._usage(output)}
        if ended:
            self.response["completed_at"] = int(time.time())
        else:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.response)

    def _usage(self, output: Output) -> dict[str, Any]:
        self.call.context.facts |= replies.facts(output)
        usage = output.usage
        return {
            "input_tokens": usage.prompt_tokens,
            # What is new is always kept for later, and at no price: nothing is written as the API means it.
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thinking(output.tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _thinking(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are of the thinking."""
        return replies.thinking_tokens(self.call.service, tokens) if self.read.thinks else 0

    def _more_logprobs(self) -> list[dict[str, Any]]:
        """The logprobs of the tokens of the text that have come since; the message that is open has them too then."""
        if not self.logprobs:
            return []
        start = self.listed or self._thinking(self.tokens)
        self.listed = len(self.tokens)
        engine, ignore_eos = self.call.service.engine, self.call.body.get("ignore_eos", False)
        told = replies.told_logprobs(engine, self.tokens[start:], self.logprobs[start:], ignore_eos=ignore_eos)
        more = replies.entries(engine, told)
        self.output[-1]["content"][0]["logprobs"] += more
        return more

    def _added(self, item: Item) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def _done(self) -> bytes:
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=self.output[-1])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _inside(self) -> dict[str, Any]:
        return self._place() | {"content_index": 0}  # items of text have one part

    def _event(self, kind: str, **told: Any) -> bytes:
        return server_sent({"type": kind, "sequence_number": next(self.numbers)} | told, kind)


def _begun(call: Call, params: SamplingParams) -> dict[str, Any]:
    """A response before anything is written: all that the types of clients need, and what was asked for."""
    body = call.body
    echoed = ("instructions", "max_output_tokens", "prompt_cache_key", "safety_identifier", "user")
    absent = ("completed_at", "error", "incomplete_details", "max_tool_calls", "previous_response_id", "usage")
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": call.service.name,
        "output": [],
        "background": False,
        "store": False,
        "service_tier": "default",
        "truncation": "disabled",
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": {"effort": body.get("reasoning", {}).get("effort"), "summary": None},
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}} | body.get("text", {}),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": asked.served_tools(body),
        "top_logprobs": body.get("top_logprobs", 0),
        "top_p": params.top_p,
    } | {name: body.get(name) for name in (*echoed, *absent)}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


ENDPOINTS = (
    Endpoint("POST", "/v1/responses", respond, "The next items of a conversation", asked.RESPONSE, stream=EVENTS),
    Endpoint("GET", "/v1/responses/{response_id}", stored, "A response that was stored: there is none"),
    Endpoint("DELETE", "/v1/responses/{response_id}", stored, "The same"),
)
