"""OpenAI's API: /v1/chat/completions, /v1/completions and /v1/models, as its clients expect them; and /v1/responses,
which responses.py answers.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from bough.config import SamplingParams
from bough.engine.request import Output, Piece, Usage
from bough.engine.sampler import Logprobs
from bough.engine.tool_formats import ToolCall
from bough.engine.tools import Part, Reader, Said
from bough.server import openai_requests as asked
from bough.server import replies, responses
from bough.server.api import Api, Call, Endpoint, Json, Stream, server_sent
from bough.server.errors import ApiError, no_such_model
from bough.server.generation import QUIET, Generation

DONE = server_sent("[DONE]")
ALIVE = b": still working\n\n"
EVENTS = "text/event-stream"


async def chat(call: Call) -> Response:
    body, service = call.body, call.service
    service.require_model(body.get("model"))
    engine = service.engine
    salt = call.salt(body.get("cache_salt"))
    params = asked.chat_sampling(body, engine.defaults, salt, service.most_tokens)
    tools, forced, several = asked.chat_tools(body), asked.forced_tools(body), asked.several_calls(body)
    prompt = await service.chat_prompt(asked.chat_messages(body), tools, asked.template_options(body))
    params = replies.constrained(params, service, prompt, tools, forced, several=several)
    choices = await _choices(call, params)
    generation = await service.start([(prompt, each) for each in choices])
    readers = [replies.reader(service, prompt, params, tools, several=several) for _ in generation.handles]
    return await _answer(call, ChatAnswer(call, generation, readers))


async def complete(call: Call) -> Response:
    body, service = call.body, call.service
    service.require_model(body.get("model"))
    params = asked.completion_sampling(body, service.engine.defaults, call.salt(body.get("cache_salt")))
    given = asked.completion_prompts(body)
    service.require_possible(len(given) * body.get("n", 1))  # before any work on them: there may be very many
    prompts = [await service.plain_prompt(prompt) for prompt in given]
    choices = await _choices(call, params)
    wanted = [(prompt, each) for prompt in prompts for each in choices]
    return await _answer(call, CompletionAnswer(call, await service.start(wanted)))


async def _choices(call: Call, params: SamplingParams) -> list[SamplingParams]:
    """The sampling of each continuation. It takes a while where there are many, with very many biases."""
    return await asyncio.to_thread(asked.choices, params, call.body.get("n", 1))


async def models(call: Call) -> Response:
    """In a form that is both OpenAI's and Anthropic's."""
    names = call.service.names
    pages = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return Json({"object": "list", "data": [_model(call, name) for name in names]} | pages)


async def model(call: Call) -> Response:
    name = call.request.path_params["model"]
    if name not in call.service.names:
        raise no_such_model(name, call.service.name)
    return Json(_model(call, name))


def _model(call: Call, name: str) -> dict[str, Any]:
    service = call.service
    about = {"id": name, "object": "model", "created": service.started, "owned_by": "bough"}
    created = datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
    about |= {"type": "model", "display_name": name, "created_at": created}
    return about | {"max_model_len": service.engine.context}


async def _answer(call: Call, answer: "Answer") -> Response:
    if call.body.get("stream"):
        return Stream(answer.generation, answer.events(), EVENTS, lambda told: server_sent(error(told)))
    outputs = await call.outputs(answer.generation)
    call.context.facts |= _facts(outputs)
    return Json(answer.whole(outputs))


class Answer:
    """How one endpoint writes what is generated, whole or as events. An instance is one answer."""

    prefix, object, chunk = "", "", ""

    def __init__(self, call: Call, generation: Generation) -> None:
        self.call, self.engine, self.generation = call, call.service.engine, generation
        self.head = {
            "id": self.prefix + secrets.token_hex(12),
            "object": self.object,
            "created": int(time.time()),
            "model": call.service.name,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return self.head | {"choices": choices, "usage": usage(outputs, self.call.body.get("n", 1))}

    async def events(self) -> AsyncIterator[bytes]:
        counts = (self.call.body.get("stream_options") or {}).get("include_usage", False)
        head = self.head | {"object": self.chunk} | ({"usage": None} if counts else {})
        for choice in self.openings():
            yield server_sent(head | {"choices": [choice]})
        outputs: dict[int, Output] = {}
        async for index, piece in self.generation:
            if piece is QUIET:
                yield ALIVE
                continue
            if piece is None:
                outputs[index] = self.generation.output(index)
                made = self.ending(index, outputs[index])
            else:
                made = self.pieces(index, piece)
            for choice in made:
                yield server_sent(head | {"choices": [choice]})
        ended = [outputs[index] for index in range(len(outputs))]
        self.call.context.facts |= _facts(ended)
        if counts:
            yield server_sent(head | {"choices": [], "usage": usage(ended, self.call.body.get("n", 1))})
        yield DONE

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        raise NotImplementedError

    def openings(self) -> list[dict[str, Any]]:
        return []

    def pieces(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def ending(self, index: int, output: Output) -> list[dict[str, Any]]:
        raise NotImplementedError

    def told(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> list[tuple[int, Logprobs]]:
        ignore_eos = self.call.body.get("ignore_eos", False)
        return replies.told_logprobs(self.engine, tokens, logprobs, ignore_eos=ignore_eos)


class ChatAnswer(Answer):
    """Messages, or the deltas of them: what is said, what is thought, and calls of tools."""

    prefix, object, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: Call, generation: Generation, readers: list[Reader]) -> None:
        super().__init__(call, generation)
        self.readers = readers
        self.calls = [0] * len(readers)  # that each choice has made

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        reply = replies.whole(self.readers[index], output)
        calls = [self._tool_call(index, call) for call in reply.calls]
        content = None if calls and not reply.text else reply.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": reply.thinking} if reply.thinking else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = self._logprobs(output.tokens, output.logprobs)
        reason = self._reason(index, output)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def openings(self) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(len(self.readers))]

    def pieces(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        deltas = [self._part(index, part) for part in self.readers[index].push(piece)]
        if (logprobs := self._logprobs(piece.tokens, piece.logprobs)) is not None:
            deltas = deltas or [self._delta(index, {"content": ""})]
            deltas[0]["logprobs"] = logprobs
        return deltas

    def ending(self, index: int, output: Output) -> list[dict[str, Any]]:
        rest = [self._part(index, part) for part in self.readers[index].finish()]
        return [*rest, self._delta(index, {}, self._reason(index, output))]

    def _part(self, index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            number = self.calls[index]
            return self._delta(index, {"tool_calls": [{"index": number} | self._tool_call(index, part)]})
        return self._delta(index, {"content" if isinstance(part, Said) else "reasoning_content": part.text})

    def _tool_call(self, index: int, call: ToolCall) -> dict[str, Any]:
        self.calls[index] += 1
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _reason(self, index: int, output: Output) -> str:
        reason = _reason(output)
        return "tool_calls" if self.calls[index] and reason == "stop" else reason

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        content = replies.entries(self.engine, self.told(tokens, logprobs))
        return {"content": content, "refusal": None} if content else None


class CompletionAnswer(Answer):
    """Text as it goes on."""

    prefix, object, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, call: Call, generation: Generation) -> None:
        super().__init__(call, generation)
        self.offsets: dict[int, int] = {}  # characters that the told tokens of each choice spell so far

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        return self._choice(index, output.text, output.tokens, output.logprobs, _reason(output))

    def pieces(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        if not (piece.text or piece.logprobs or self.call.body.get("return_token_ids")):
            return []
        return [self._choice(index, piece.text, piece.tokens, piece.logprobs)]

    def ending(self, index: int, output: Output) -> list[dict[str, Any]]:
        return [self._choice(index, "", [], [], _reason(output))]

    def _choice(
        self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[Logprobs], reason: str | None = None
    ) -> dict[str, Any]:
        ids = {"token_ids": list(tokens)} if self.call.body.get("return_token_ids") else {}
        told = {"index": index, "text": text, "logprobs": self._logprobs(index, tokens, logprobs)}
        return told | {"finish_reason": reason} | ids

    def _logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        told = self.told(tokens, logprobs)
        spelt = [self._text(token) for token, _ in told]
        offsets = []
        for text in spelt:
            offsets.append(self.offsets.setdefault(index, 0))
            self.offsets[index] += len(text)
        return {
            "tokens": spelt,
            "token_logprobs": [each.chosen for _, each in told],
            "top_logprobs": [{self._text(token): logprob for token, logprob in each.top} for _, each in told],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return replies.spell(self.engine, token).decode(errors="replace")


def usage(outputs: Sequence[Output], n: int) -> dict[str, Any]:
    """What the request cost. A prompt counts once, whatever the number of its continuations, and as cached as it was
    for the one that had it read.
    """
    firsts = [_least_cached(outputs[at : at + n]) for at in range(0, len(outputs), n)]
    prompt = sum(each.prompt_tokens for each in firsts)
    completion = sum(output.usage.completion_tokens for output in outputs)
    accepted = sum(output.usage.accepted_tokens for output in outputs)
    drafted = sum(output.usage.drafted_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _least_cached(outputs: Sequence[Output]) -> Usage:
    return min((output.usage for output in outputs), key=lambda each: each.cached_tokens)


def _reason(output: Output) -> str:
    return "length" if output.finish_reason == "deadline" else output.finish_reason


def _facts(outputs: Sequence[Output]) -> dict[str, Any]:
    """For the log."""
    return {
        "prompt_tokens": sum(output.usage.prompt_tokens for output in outputs),
        "cached_tokens": sum(output.usage.cached_tokens for output in outputs),
        "completion_tokens": sum(output.usage.completion_tokens for output in outputs),
        "finish_reason": ",".join(sorted({output.finish_reason for output in outputs})),
    }


def error(told: ApiError) -> dict[str, Any]:
    return {"error": {"message": told.message, "type": told.kind, "param": told.param, "code": told.code}}


API = Api(
    "openai",
    ("/v1",),
    error,
    (
        Endpoint("POST", "/v1/chat/completions", chat, "The next message of a conversation", asked.CHAT, stream=EVENTS),
        Endpoint("POST", "/v1/completions", complete, "A prompt, continued", asked.COMPLETION, stream=EVENTS),
        *responses.ENDPOINTS,
        Endpoint("GET", "/v1/models", models, "What is served"),
        Endpoint("GET", "/v1/models/{model:path}", model, "One model"),
    ),
)
