"""What Ollama's API lets a client ask: the tables of its fields, and how they become prompts and sampling.

As in OpenAI's, what cannot be honoured is refused, and names that nobody here knows are ignored: that goes for most of
the options, which are about how Ollama loads a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bough.config import Grammar, SamplingParams
from bough.engine.template import ChatTemplate
from bough.engine.tokenizer import Tokenizer
from bough.engine.tools import Dialect
from bough.errors import TemplateError
from bough.server.generation import Prompt, Service
from bough.server.openai_requests import LEAST_TOP_P, PENALTY, REPETITION, SIXTY_FOUR_BITS, STOP, TOKEN, TOOL
from bough.server.schema import Either, Flag, Invalid, Listed, Number, Record, Shape, Text, Whole

OPTIONS = Record(
    {
        "num_predict": Whole(-2, about="the most tokens to write; below 0: as many as fit"),
        "temperature": Number(0),
        "top_k": Whole(-1),
        "top_p": Number(0, 1),
        "min_p": Number(0, 1),
        "seed": Whole(*SIXTY_FOUR_BITS, about="below 0: a fresh one"),
        "stop": STOP,
        "repeat_penalty": REPETITION,
        "presence_penalty": PENALTY,
        "frequency_penalty": PENALTY,
        "num_ctx": Whole(0, about="ignored: the context is as the server was started"),
    }
)
SHARED: dict[str, Shape] = {
    "model": Text(about="the name that /api/tags tells; none: the one there is"),
    "stream": Flag(about="true if it is left out"),
    "options": OPTIONS,
    "format": Either((Text(("", "json")), Record({}, open=True)), "json, or a JSON schema"),
    "think": Either((Flag(), Text(("low", "medium", "high"))), "true, false, low, medium or high"),
    "keep_alive": Either((Number(), Text()), "a number of seconds, or a text", about="ignored: the model stays"),
    "logprobs": Flag(about="not supported: has to be false"),
}
IMAGES = Listed(Text(), about="not supported: has to be empty")
GENERATE = Record(
    SHARED
    | {
        "prompt": Text(),
        "suffix": Text(about="not supported: has to be empty"),
        "images": IMAGES,
        "system": Text(),
        "template": Text(about="not supported: has to be empty"),
        "context": Listed(TOKEN, about="what an earlier answer gave as its context, to go on from"),
        "raw": Flag(about="the prompt is the text to continue, without a chat template"),
    }
)
MESSAGE = Record(
    {
        "role": Text(least=1),
        "content": Text(),
        "thinking": Text(),
        "images": IMAGES,
        "tool_name": Text(),
        "tool_call_id": Text(),
        "tool_calls": Listed(
            Record(
                {"function": Record({"name": Text(least=1), "arguments": Record({}, open=True)}, ("name",))},
                needed=("function",),
            )
        ),
    },
    needed=("role",),
)
CHAT = Record(SHARED | {"messages": Listed(MESSAGE), "tools": Listed(TOOL)})
NAMED = Record({"model": Text(least=1), "name": Text(least=1, about="the older name of model")})
EMBED = Record({"model": Text()})

REPLY = "a reply to go on after"  # stands for one in a chat of which only tokens are known


def model_name(body: Mapping[str, Any]) -> str | None:
    """The model that is asked for. What has no tag is the latest."""
    name = body.get("model", body.get("name"))
    return name.removesuffix(":latest") if name else None


def sampling(body: Mapping[str, Any], service: Service, salt: str | None) -> SamplingParams:
    if body.get("logprobs"):
        raise Invalid("logprobs", "false: they are told by /v1/chat/completions and /v1/completions")
    options = body.get("options", {})
    most = options.get("num_predict", service.most_tokens)
    given: dict[str, Any] = {"max_tokens": service.engine.context if most < 0 else most, "cache_salt": salt}
    same = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "stop")
    given |= {name: options[name] for name in same if name in options}
    if "repeat_penalty" in options:
        given["repetition_penalty"] = options["repeat_penalty"]
    if "top_p" in options:
        given["top_p"] = max(options["top_p"], LEAST_TOP_P)
    if "top_k" in options:
        given["top_k"] = max(options["top_k"], 0)
    if options.get("seed", -1) >= 0:
        given["seed"] = options["seed"]
    if wanted := body.get("format"):
        given["grammar"] = Grammar.json_object() if wanted == "json" else Grammar.json_schema(wanted)
    return replace(service.engine.defaults, **given)


def template_options(body: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """Variables for the chat template. Where the text has to follow a grammar, there is thinking if it is asked for."""
    think = body.get("think", False if body.get("format") else None)
    if think is None:
        return {}
    if think and service.engine.tokenizer and Dialect.of(service.engine.tokenizer).thinking is None:
        raise Invalid("think", f"false: {service.name!r} does not support thinking")
    return {"enable_thinking": bool(think)} | ({"reasoning_effort": think} if isinstance(think, str) else {})


def chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages as chat templates read them. Calls have no ids in this API: they are numbered, and answered in turn."""
    told, called, answers = [], list[str](), 0
    for at, message in enumerate(body.get("messages", ())):
        if message.get("images"):
            raise Invalid(f"messages[{at}].images", "empty: the model reads text")
        plain = {"role": message["role"], "content": message.get("content", "")}
        if message.get("thinking"):
            plain["thinking"] = message["thinking"]
        if functions := [call["function"] for call in message.get("tool_calls", ())]:
            plain["tool_calls"] = [_call(each, len(called) + index) for index, each in enumerate(functions)]
            called += [each["name"] for each in functions]
        if message["role"] == "tool":
            name = message.get("tool_name") or (called[answers] if answers < len(called) else None)
            plain |= {"tool_call_id": _id(answers)} | ({"name": name} if name else {})
            answers += 1
        told.append(plain)
    return told


def _call(function: Mapping[str, Any], index: int) -> dict[str, Any]:
    named = {"name": function["name"], "arguments": function.get("arguments", {})}
    return {"type": "function", "id": _id(index), "function": named}


def _id(index: int) -> str:
    return f"{index:09}"  # some templates take nine characters and nothing else


def is_raw(body: Mapping[str, Any], service: Service) -> bool:
    """Whether the prompt is continued as it is: it should be, or there is no chat template."""
    tokenizer = service.engine.tokenizer
    return body.get("raw", False) or tokenizer is None or not tokenizer.template


async def generate_prompt(body: Mapping[str, Any], service: Service) -> Prompt:
    """The prompt of /api/generate: a chat of one message, or the next of one that came back as its tokens."""
    for name in ("suffix", "template", "images"):
        if body.get(name):
            raise Invalid(name, "empty: it is not supported")
    text, context = body.get("prompt", ""), body.get("context", [])
    tokenizer, template = service.engine.tokenizer, service.template
    if tokenizer is None or template is None:
        raise TemplateError("the model has no tokenizer; send token ids to /v1/completions")
    if is_raw(body, service):
        if not context:
            return await service.plain_prompt(text)
        return await service.plain_prompt([*context, *tokenizer.encode_split(text, follows=True)[0]])
    options = template_options(body, service)
    if context:
        return await service.plain_prompt(_continued(template, tokenizer, context, text, options))
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return await service.chat_prompt([*system, {"role": "user", "content": text}], None, options)


def _continued(
    template: ChatTemplate, tokenizer: Tokenizer, context: Sequence[int], text: str, options: Mapping[str, Any]
) -> list[int]:
    """A chat that is known by its tokens, gone on with: they stay, and what a template puts after a reply follows."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}]
    rendered = template.render([*said, {"role": "user", "content": text}], **options)
    end = rendered.find(REPLY) + len(REPLY)
    if end < len(REPLY):
        raise TemplateError("the chat template leaves out replies; send the whole chat to /api/chat")
    kept = list(context)
    while kept and kept[-1] in tokenizer.special_ids:  # the template writes its own end of the reply
        kept.pop()
    return kept + tokenizer.encode_split(rendered[end:], follows=True)[0]
