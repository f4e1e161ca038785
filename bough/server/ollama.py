"""Ollama's API: /api/generate, /api/chat and what its clients ask about models, as they expect it."""

import hashlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from starlette.responses import PlainTextResponse, Response

from bough.engine.request import Output
from bough.engine.tool_formats import ToolCall
from bough.engine.tools import Dialect, Part, Reader, Said, Thought
from bough.server import ollama_requests as asked
from bough.server import ollama_store, replies
from bough.server.api import Api, Call, Endpoint, Json, Stream, json_line
from bough.server.errors import ApiError
from bough.server.generation import Generation, Prompt, Service
from bough.server.replies import Reply

VERSION = "0.12.0"  # of the Ollama whose API this is: clients decide by it what they may ask
LINES = "application/x-ndjson"
FOREVER = "2318-01-01T00:00:00Z"  # when the model is unloaded


async def generate(call: Call) -> Response:
    body, service, arrived = call.body, call.service, time.perf_counter()
    service.require_model(asked.model_name(body))
    if not body.get("prompt"):
        return Json(_loaded(call, {"response": ""}))
    params = asked.sampling(body, service, call.salt())
    prompt = await asked.generate_prompt(body, service)
    if not (raw := asked.is_raw(body, service)):
        params = replies.constrained(params, service, prompt)
    read = replies.reader(service, prompt, params, plain=raw)
    return await _answer(call, await service.start([(prompt, params)]), GenerateAnswer(call, arrived, prompt, read))


async def chat(call: Call) -> Response:
    body, service, arrived = call.body, call.service, time.perf_counter()
    service.require_model(asked.model_name(body))
    if not body.get("messages"):
        return Json(_loaded(call, {"message": {"role": "assistant", "content": ""}}))
    params = asked.sampling(body, service, call.salt())
    tools, options = body.get("tools") or None, asked.template_options(body, service)
    prompt = await service.chat_prompt(asked.chat_messages(body), tools, options)
    params = replies.constrained(params, service, prompt, tools)
    read = replies.reader(service, prompt, params, tools)
    return await _answer(call, await service.start([(prompt, params)]), ChatAnswer(call, arrived, prompt, read))


async def _answer(call: Call, generation: Generation, answer: "Answer") -> Response:
    if call.body.get("stream", True):
        return Stream(generation, answer.lines(generation), LINES, lambda told: json_line(error(told)))
    [output] = await call.outputs(generation)
    return Json(answer.whole(generation, output))


class Answer:
    """How one endpoint writes what was generated, whole or line by line."""

    def __init__(self, call: Call, arrived: float, prompt: Prompt, read: Reader) -> None:
        self.call, self.arrived, self.prompt, self.read = call, arrived, prompt, read

    def whole(self, generation: Generation, output: Output) -> dict[str, Any]:
        reply = replies.whole(self.read, output)
        return _head(self.call) | self.told(reply) | self.ending(generation, output)

    async def lines(self, generation: Generation) -> AsyncIterator[bytes]:
        async for part in replies.parts(generation, self.read):
            yield json_line(_head(self.call) | self.told(_one(part)) | {"done": False})
        output = generation.output()
        yield json_line(_head(self.call) | self.told(Reply()) | self.ending(generation, output))

    def told(self, reply: Reply) -> dict[str, Any]:
        """A reply, or a part of one, in the fields of the endpoint."""
        raise NotImplementedError

    def ending(self, generation: Generation, output: Output) -> dict[str, Any]:
        """Why it ended, and what it cost; times are nanoseconds."""
        usage, now = output.usage, time.perf_counter()
        first = generation.first[0] or now
        reason = "stop" if output.finish_reason == "stop" else "length"
        self.call.context.facts |= replies.facts(output)
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(self.arrived, now),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(generation.began, first),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(first, now),
        }


class GenerateAnswer(Answer):
    """Text; in the end the tokens of all there was."""

    def told(self, reply: Reply) -> dict[str, Any]:
        return {"response": reply.text} | ({"thinking": reply.thinking} if reply.thinking else {})

    def ending(self, generation: Generation, output: Output) -> dict[str, Any]:
        return super().ending(generation, output) | {"context": [*self.prompt.tokens, *output.tokens]}


class ChatAnswer(Answer):
    """Messages."""

    def told(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.thinking:
            message["thinking"] = reply.thinking
        if reply.calls:
            message["tool_calls"] = [{"function": {"name": c.name, "arguments": c.arguments}} for c in reply.calls]
        return {"message": message}


def _one(part: Part | None) -> Reply:
    match part:
        case Said(text):
            return Reply(text)
        case Thought(text):
            return Reply(thinking=text)
        case ToolCall():
            return Reply(calls=[part])
    return Reply()


def _head(call: Call) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"model": call.service.name, "created_at": now.replace("+00:00", "Z")}


def _loaded(call: Call, told: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, with which clients have a model loaded ahead of time: it is."""
    return _head(call) | told | {"done": True, "done_reason": "load"}


def _nanoseconds(start: float, end: float) -> int:
    return max(0, round((end - start) * 1e9))


async def tags(call: Call) -> Response:
    served = [_about(call.service, name) for name in call.service.names]
    return Json({"models": served + await ollama_store.tags(call)})


async def running(call: Call) -> Response:
    """What is loaded; it stays so."""
    engine = call.service.engine
    size = engine.model.weight_bytes + engine.used_bytes
    held = {"size": size, "size_vram": size if engine.model.device.type == "cuda" else 0}
    loaded = held | {"expires_at": FOREVER, "context_length": engine.context}
    return Json({"models": [_about(call.service, name) | loaded for name in call.service.names]})


async def show(call: Call) -> Response:
    service, engine, name = call.service, call.service.engine, asked.model_name(call.body)
    if name not in service.names and (stored := await ollama_store.show(call, name)):
        return stored
    service.require_model(name)
    about, family = _about(service, service.name), _family(service)
    tokenizer = engine.tokenizer
    dialect = Dialect.of(tokenizer) if tokenizer is not None else Dialect()
    template = tokenizer.template if tokenizer is not None else None
    return Json(
        {
            "modelfile": f"FROM {service.name}",
            "parameters": "",
            "template": template if isinstance(template, str) else "\n".join((template or {}).values()),
            "details": about["details"],
            "modified_at": about["modified_at"],
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": engine.model.parameters,
                f"{family}.context_length": engine.context,
                f"{family}.embedding_length": engine.model.hidden_size,
                f"{family}.block_count": len(engine.model.kinds),
            },
            "capabilities": ["completion"]
            + (["tools"] if dialect.calls else [])
            + (["thinking"] if dialect.thinking else []),
        }
    )


def _about(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    family, count = _family(service), engine.model.parameters
    # Not of the weights themselves, which would take long to read.
    told = json.dumps([name, count, engine.model.config.raw], sort_keys=True, default=str)
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z"),
        "size": engine.model.weight_bytes,
        "digest": hashlib.sha256(told.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
            "quantization_level": {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(_dtype(service), ""),
        },
    }


def _family(service: Service) -> str:
    return str(service.engine.model.config.get("model_type", type(service.engine.model).__name__.lower()))


def _dtype(service: Service) -> str:
    return str(service.engine.model.dtype).removeprefix("torch.")


async def version(call: Call) -> Response:
    return Json({"version": VERSION})


async def embed(call: Call) -> Response:
    call.service.require_model(asked.model_name(call.body))
    raise ApiError(400, f"{call.service.name!r} does not support embeddings: this server writes text and nothing else")


async def alive(call: Call) -> Response:
    return PlainTextResponse("Bough is running")


def error(told: ApiError) -> dict[str, Any]:
    return {"error": told.message}


API = Api(
    "ollama",
    ("/api",),
    error,
    (
        Endpoint("POST", "/api/generate", generate, "A prompt, answered", asked.GENERATE, stream=LINES),
        Endpoint("POST", "/api/chat", chat, "The next message of a conversation", asked.CHAT, stream=LINES),
        Endpoint("GET", "/api/tags", tags, "What is served, and what is stored"),
        Endpoint("GET", "/api/ps", running, "What is loaded"),
        Endpoint("POST", "/api/show", show, "One model", asked.NAMED),
        *ollama_store.ENDPOINTS,
        Endpoint("GET", "/api/version", version, "The version of Ollama whose API this is"),
        Endpoint("POST", "/api/embed", embed, "Not supported", asked.EMBED),
        Endpoint("POST", "/api/embeddings", embed, "Not supported", asked.EMBED),
        Endpoint("GET", "/", alive, "Whether the server is there", media_type="text/plain"),
    ),
)
