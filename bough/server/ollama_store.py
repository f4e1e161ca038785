"""What Ollama's API does with the models in the store: tells of them, pulls new ones or makes them of others, copies
and removes them.

The model that is served stays the one that was loaded. A client names stored models, or repositories of the hub, and
nothing else: no path of this machine is read because one asked for it.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.responses import Response, StreamingResponse

from bough.engine.about import About
from bough.errors import BoughError, ModelError
from bough.server.api import Call, Endpoint, Json, json_line
from bough.server.errors import ApiError, as_api_error
from bough.server.schema import Either, Flag, Invalid, Listed, Record, Text
from bough.store.create import create as create_model
from bough.store.fit import config_of
from bough.store.modelfile import IDLE, WHOLE, Modelfile, check_parameters, check_template
from bough.store.names import Name
from bough.store.pull import HubId, Remote
from bough.store.pull import pull as pull_model
from bough.store.store import Store, Stored

LINES = "application/x-ndjson"
AT_ONCE = 4  # models that are made or pulled; who asks for more waits, and nobody who asks for something else does
NAME = Text(least=1, about="[namespace/]name[:tag]")
UNSUPPORTED = {
    "files": "left out: files are not uploaded; store the model on the server's machine, and name it as from",
    "adapters": "left out: merge them into the weights first",
    "messages": "left out: put them into system",
    "modelfile": "left out: give its parts as from, system, template and parameters",
    "path": "left out: give from, the name of a stored model",
}
ANYTHING = Either((Record({}, open=True), Listed(Record({}, open=True)), Text()), "left out", about="not supported")
CREATE = Record(
    {
        "model": NAME,
        "name": Text(least=1, about="the older name of model"),
        "from": Text(least=1, about="the stored model to begin with"),
        "draft": Text(least=1, about="the stored model that guesses tokens ahead for it"),
        "template": Text(about="a chat template in Jinja"),
        "system": Text(),
        "license": Either((Text(), Listed(Text())), "a text, or a list of them"),
        "parameters": Record({}, open=True, about="as PARAMETER in a Modelfile"),
        "quantize": Text(about="int8 or int4"),
        "draft_quantize": Text(about="int8 or int4"),
        "stream": Flag(about="true if it is left out"),
        **dict.fromkeys(UNSUPPORTED, ANYTHING),
    }
)
PULL = Record(
    {
        "model": Text(least=1, about="a repository of the Hugging Face hub: organisation/name[:revision]"),
        "name": Text(least=1, about="the older name of model"),
        "file": Text(least=1, about="which GGUF file, by its name or a part of it"),
        "stream": Flag(about="true if it is left out"),
    }
)
COPY = Record({"source": NAME, "destination": NAME}, needed=("source", "destination"))
DELETE = Record({"model": NAME, "name": Text(least=1, about="the older name of model")})

log = logging.getLogger("bough.server")
threads = ThreadPoolExecutor(AT_ONCE, "bough-store")


async def create(call: Call) -> Response:
    store, body = _store(call), call.body
    for field, allowed in UNSUPPORTED.items():
        if body.get(field):
            raise Invalid(field, allowed)
    name, modelfile = _name(body), _modelfile(body)
    schemes = {"scheme": body.get("quantize") or None, "draft_scheme": body.get("draft_quantize") or None}
    return await _answer(
        call, lambda tell: create_model(store, name, modelfile, **schemes, only_stored=True, tell=tell)
    )


async def pull(call: Call) -> Response:
    store, hub, file = _store(call), _repository(call.body), call.body.get("file")

    def make(tell: Line) -> Stored:
        def fetched(remote: Remote, done: int) -> None:
            if remote.sha256:
                tell(f"pulling {remote.sha256[:12]}", done, remote.size, digest=f"sha256:{remote.sha256}")
            else:
                tell(f"pulling {remote.name}", done, remote.size)

        tell("pulling manifest")
        return pull_model(store, hub, file=file, tell=lambda what, done, total: tell(what), fetched=fetched)

    return await _answer(call, make)


async def _answer(call: Call, make: Callable[["Line"], Stored]) -> Response:
    work = Work(make)
    if call.body.get("stream", True):
        return StreamingResponse(work.lines(), media_type=LINES, headers={"Cache-Control": "no-cache"})
    await work.done()
    return Json({"status": "success"})


async def delete(call: Call) -> Response:
    await asyncio.to_thread(_store(call).remove, await _there(call, _name(call.body)))
    return Json({})


async def copy(call: Call) -> Response:
    source, target = (_parsed(call.body[field], field) for field in ("source", "destination"))
    await asyncio.to_thread(_store(call).copy, await _there(call, source), target)
    return Json({})


ENDPOINTS = (
    Endpoint("POST", "/api/create", create, "A model made of a stored one", CREATE, stream=LINES),
    Endpoint("POST", "/api/pull", pull, "A model of the Hugging Face hub, stored", PULL, stream=LINES),
    Endpoint("DELETE", "/api/delete", delete, "Remove a stored model", DELETE),
    Endpoint("POST", "/api/copy", copy, "A second name for a stored model", COPY),
)


async def tags(call: Call) -> list[dict[str, Any]]:
    """The stored models, beside the one that is served."""
    folder = call.service.settings.store
    if folder is None:
        return []
    stored = await asyncio.to_thread(Store(folder).all)
    others = [each for each in stored if str(each.name) not in call.service.names]
    return [told for each in others if (told := await asyncio.to_thread(_about, each))]


async def show(call: Call, name: str | None) -> Json | None:
    """What is told of a stored model; None if it is not one."""
    folder, wanted = call.service.settings.store, Name.maybe(name or "")
    if folder is None or wanted is None or (stored := await asyncio.to_thread(Store(folder).find, wanted)) is None:
        return None
    return Json(await asyncio.to_thread(_shown, stored))


class Line(Protocol):
    """Tells of what is being done: how much of it is, of how much, if that is known, and other fields of the line."""

    def __call__(self, what: str, done: int = 0, total: int = 0, /, **more: str) -> None: ...


class Work:
    """A model being made in a thread. Who leaves the answer breaks it off; the next one who asks goes on with it."""

    def __init__(self, make: Callable[[Line], Stored]) -> None:
        self.make = make
        self.loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.told: set[tuple[str, int]] = set()
        self.left = False

    async def done(self) -> None:
        try:
            await self._start()
        finally:
            self.left = True

    async def lines(self) -> AsyncIterator[bytes]:
        making = self._start()
        making.add_done_callback(self._ended)
        try:
            while (told := await self.news.get()) is not None:
                yield json_line(told)
            await making
            yield json_line({"status": "success"})
        except Exception as error:  # the status is sent already: the client is told in the stream
            refused = as_api_error(error)
            if refused.code == "internal_error":
                log.exception("a model could not be stored")
            yield json_line({"error": refused.message})
        finally:
            self.left = True

    def _start(self) -> "asyncio.Future[Stored]":
        return self.loop.run_in_executor(threads, self.make, self._tell)

    def _ended(self, making: "asyncio.Future[Stored]") -> None:
        if not making.cancelled():
            making.exception()  # whoever left does not ask for it
        self.news.put_nowait(None)

    def _tell(self, what: str, done: int = 0, total: int = 0, /, **more: str) -> None:
        """In the thread. The same is told once, and what goes on for long in hundredths."""
        if self.left:
            raise ModelError("the client left")
        news = (what, 100 * done // max(1, total))
        if news not in self.told:
            self.told.add(news)
            progress = {"total": total, "completed": done} if total else {}
            self.loop.call_soon_threadsafe(self.news.put_nowait, {"status": what, **more, **progress})


def _store(call: Call) -> Store:
    folder = call.service.settings.store
    if folder is None:
        raise ApiError(403, "this server keeps no model store", kind="permission_error", code="no_store")
    return Store(folder)


async def _there(call: Call, name: Name) -> Name:
    if not await asyncio.to_thread(_store(call).has, name):
        raise ApiError(404, f"model '{name}' not found in the store", code="model_not_found", param="model")
    return name


def _name(body: dict[str, Any]) -> Name:
    return _parsed(_asked(body), "model")


def _repository(body: dict[str, Any]) -> HubId:
    text = _asked(body)
    found = HubId.maybe(text)
    if found is None:
        raise Invalid("model", "a repository of the Hugging Face hub: organisation/name[:revision]", text)
    return found


def _asked(body: dict[str, Any]) -> str:
    text: str | None = body.get("model", body.get("name"))
    if text is None:
        raise Invalid("model", "given")
    return text


def _parsed(text: str, field: str) -> Name:
    found = Name.maybe(text)
    if found is None:
        raise Invalid(field, "a name: [namespace/]name[:tag]", text)
    return found


def _modelfile(body: dict[str, Any]) -> Modelfile:
    if "from" not in body:
        raise Invalid("from", "given: the name of a stored model")
    for field in {"from", "draft"} & body.keys():
        _parsed(body[field], field)
    license = body.get("license", ())
    template, parameters = body.get("template") or None, _parameters(body.get("parameters", {}))
    if template is not None:
        check_template(template)
    return Modelfile(
        body["from"],
        draft=body.get("draft"),
        template=template,
        system=body.get("system"),
        parameters=parameters,
        license=(license,) if isinstance(license, str) else tuple(license),
    )


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    parameters = {name.lower(): value for name, value in given.items() if name.lower() not in IDLE}
    for name, value in parameters.items():
        if name in WHOLE and isinstance(value, float) and value.is_integer():
            parameters[name] = int(value)
        if name == "stop":
            parameters[name] = [value] if isinstance(value, str) else value
            if not isinstance(parameters[name], list):
                raise Invalid("parameters.stop", "a text, or a list of them", value)
    check_parameters(parameters)
    return parameters


def _about(stored: Stored) -> dict[str, Any] | None:
    """An entry of the list; None for a model that went meanwhile, or is damaged."""
    try:
        config, about = config_of(stored.path), stored.about
    except BoughError:
        return None
    family, weights = str(config.get("model_type", "")), about.weights
    count = weights.count if weights else 0
    return {
        "name": stored.name.full,
        "model": stored.name.full,
        "modified_at": datetime.fromtimestamp(stored.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": stored.size,
        "digest": stored.digest,
        "details": {
            "parent_model": about.source or "",
            "format": "gguf" if stored.path.is_file() else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
            "quantization_level": (weights.scheme if weights else None) or "",
        },
    }


def _shown(stored: Stored) -> dict[str, Any]:
    listed = _about(stored)
    if listed is None:
        raise ModelError(f"{stored.name} is damaged in the store; pull or create it again")
    about, config = stored.about, config_of(stored.path).text
    family = listed["details"]["family"]
    sizes = {
        "context_length": config.get("max_position_embeddings"),
        "embedding_length": config.get("hidden_size"),
        "block_count": config.get("num_hidden_layers"),
    }
    count = about.weights.count if about.weights else 0
    return {
        "modelfile": _written(stored, about),
        "parameters": "\n".join(_lines(about)),
        "template": about.template or "",
        "system": about.system or "",
        "license": "\n".join(about.license),
        "details": listed["details"],
        "modified_at": listed["modified_at"],
        "model_info": {"general.architecture": family, "general.parameter_count": count}
        | {f"{family}.{key}": value for key, value in sizes.items() if value is not None},
        "capabilities": ["completion"],
    }


def _lines(about: About) -> list[str]:
    listed = [(name, each) for name, value in about.parameters.items() for each in _several(value)]
    return [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in listed]


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _written(stored: Stored, about: About) -> str:
    """A Modelfile that makes the same of it."""
    lines = [f"FROM {stored.name}", *(f"PARAMETER {line}" for line in _lines(about))]
    for keyword, text in (("TEMPLATE", about.template), ("SYSTEM", about.system)):
        lines += [f'{keyword} """{text}"""'] if text else []
    return "\n".join(lines)
