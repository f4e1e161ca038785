"""`bough cache`: what a prefix cache holds and why a prompt hits as far as it does.

It asks a running server (--url), or reads the folder of a disk cache (--disk), which may be in use.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bough.cache.explain import Explanation, Loss
from bough.cache.extent import salt_key
from bough.cli.folder import StoredModel, stored_models
from bough.cli.run import find_model
from bough.cli.terminal import friendly, printable, show_age, show_bytes
from bough.engine.about import About
from bough.engine.caching import with_retokenised
from bough.engine.load import load_tokenizer
from bough.engine.template import ChatTemplate
from bough.engine.tokenizer import Tokenizer
from bough.errors import EmptyPrompt, OptionError, RequestError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look into the prefix cache: of a running server, or of a folder on disk.",
)
PATIENCE = 30.0  # seconds
UNSALTED = salt_key(None).hex()[:8]
Lines = Callable[[], Iterable[str | Text]]

Disk = Annotated[Path | None, typer.Option(metavar="FOLDER", help="The folder of a disk cache; it may be in use.")]
Url = Annotated[str | None, typer.Option(help="A running server, e.g. http://127.0.0.1:8080.")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="BOUGH_API_KEY", help="A key of the server.", show_envvar=True)
]
Json = Annotated[bool, typer.Option("--json", help="For machines: one line of JSON.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="A model folder or .gguf file, for its tokenizer alone; or 'bundled'.")
]


@app.command(
    epilog="Examples: [bold]bough cache tree --disk ~/bough-cache --model ./model[/bold]"
    "   [bold]bough cache tree --url http://127.0.0.1:8080[/bold]"
)
@friendly
def tree(
    disk: Disk = None,
    url: Url = None,
    model: ModelOption = None,
    api_key: Key = None,
    most: Annotated[int, typer.Option(min=1, help="Show at most so many nodes of a model.")] = 1000,
    as_json: Json = False,
) -> None:
    """Draw what is held: token ranges, where it is (* where it can be resumed), bytes, and when it was last used."""
    tokenizer = None if model is None else _tokenizer(model)
    if url is not None:
        rows = _ask(_one(disk, url), api_key, f"cache?most={most}")
        _print(rows, as_json, _readable(lambda: _drawn(rows, tokenizer)))
        return
    models = stored_models(_folder(disk))
    told: list[dict[str, Any]] = [
        {"identity": each.identity, "about": each.about, "nodes": each.describe(most)} for each in models
    ]
    _print(told, as_json, lambda: _sections(models, (_drawn(each["nodes"], tokenizer) for each in told)))


@app.command(
    epilog="Examples: [bold]bough cache stats --disk ~/bough-cache[/bold]"
    "   [bold]bough cache stats --url http://127.0.0.1:8080 --json[/bold]"
)
@friendly
def stats(disk: Disk = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Count what is held, and what went right and wrong."""
    if url is not None:
        counters = _ask(_one(disk, url), api_key, "cache/stats")
        _print(counters, as_json, _readable(lambda: _counted(counters)))
        return
    models = stored_models(_folder(disk))
    told = [{"identity": each.identity, "about": each.about, **each.stats()} for each in models]
    _print(told, as_json, lambda: _sections(models, (_counted(each.stats()) for each in models)))


@app.command(
    epilog="Examples: [bold]bough cache explain 'Why is the sky blue?' --disk ~/bough-cache --model ./model[/bold]"
    "   [bold]bough cache explain --tokens 1,2,3 --url http://127.0.0.1:8080[/bold]"
)
@friendly
def explain(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="With --model as bough run takes it: said in a chat if the model can. Else a server takes it as it is."
        ),
    ] = None,
    disk: Disk = None,
    url: Url = None,
    api_key: Key = None,
    model: ModelOption = None,
    tokens: Annotated[str | None, typer.Option(help="The prompt as token ids, e.g. 1,2,3.")] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt of the chat.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    salt: Annotated[str | None, typer.Option(help="The cache_salt of the request.")] = None,
    as_json: Json = False,
) -> None:
    """Say how much of a prompt is known, from where it can be resumed, and why the rest would be computed."""
    if (prompt is None) == (tokens is None):
        raise OptionError("give either a prompt or --tokens")
    tokenizer = None if model is None else _tokenizer(model)
    asked = _token_list(tokens) if tokens is not None else _tokens(str(prompt), tokenizer, system, raw)
    if url is not None:
        told = _ask(_one(disk, url), api_key, "cache/explain", {"prompt": asked, "cache_salt": salt})
        _print(told, as_json, _readable(lambda: map(printable, _explanation(told).lines())))
        return
    if isinstance(asked, str):
        raise OptionError("a folder on disk holds tokens, not text; name the model with --model, or give --tokens")
    models = stored_models(_folder(disk))
    found = [_explained(each, asked, salt_key(salt), tokenizer) for each in models]
    listed = [{"identity": each.identity, **asdict(told)} for each, told in zip(models, found, strict=True)]
    _print(listed, as_json, lambda: _sections(models, (told.lines() for told in found)))


def _one(disk: Path | None, url: str) -> str:
    if disk is not None:
        raise OptionError("--disk and --url are two caches; name one of them")
    return url


def _folder(disk: Path | None) -> Path:
    if disk is None:
        raise OptionError("which cache? name a folder with --disk, or a running server with --url")
    return disk.expanduser()


# The prompt.


def _tokenizer(model: str) -> Tokenizer:
    path = find_model(model)
    tokenizer = load_tokenizer(path, About.beside(path))
    if tokenizer is None:
        raise OptionError(f"{path} has no tokenizer.json; give the prompt as --tokens")
    return tokenizer


def _tokens(prompt: str, tokenizer: Tokenizer | None, system: str | None, raw: bool) -> list[int] | str:
    """The prompt that `bough run` makes of a text; the text itself if no tokenizer is at hand."""
    chats = tokenizer is not None and tokenizer.template is not None and not raw
    if system is not None and not chats:
        raise OptionError("--system needs a chat: --model with a chat template, and no --raw")
    if tokenizer is None:
        return prompt
    said = [{"role": "user", "content": prompt}]
    if chats:
        opening = [] if system is None else [{"role": "system", "content": system}]
        return ChatTemplate(tokenizer).prompt([*opening, *said]).tokens
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise EmptyPrompt("the prompt is empty; give at least one token")
    return tokens


def _token_list(text: str) -> list[int]:
    try:
        tokens = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        tokens = []
    if not tokens or not all(0 <= token < 2**31 for token in tokens):
        raise OptionError(f"{text!r} is not a list of token ids; write 1,2,3")
    return tokens


def _explained(model: StoredModel, tokens: list[int], salt: bytes, tokenizer: Tokenizer | None) -> Explanation:
    told = model.explain(tokens, salt)
    if tokenizer is None:
        return told
    return with_retokenised(told, model.tree, salt, tokens, tokenizer.token_bytes)


# A running server.


def _ask(url: str, key: str | None, what: str, body: dict[str, Any] | None = None) -> Any:
    """What the server answers: JSON, as `engine.cache` gives it."""
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"{url!r} is no address of a server; write http://127.0.0.1:8080")
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    if key is not None:
        if not key.isprintable():
            raise OptionError("the API key has characters in it that no request can carry; give it as it is printed")
        headers["Authorization"] = "Bearer " + key.encode().decode("latin-1")  # headers are bytes
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/{what}", data, headers)
        with direct.open(request, timeout=PATIENCE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            said = printable(error.read(300).decode(errors="replace"))
        if error.code == 401:
            wrong = "asks for an API key" if key is None else "does not know this API key"
            raise RequestError(f"{url} {wrong}; give one of its own with --api-key, or as BOUGH_API_KEY") from None
        raise RequestError(f"{url} refused with status {error.code}: {said or error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError(f"{url} does not answer ({reason}); is a server running there?") from None
    except ValueError:
        raise RequestError(f"{url} answers with something else than JSON; is it a Bough server?") from None


def _explanation(told: Any) -> Explanation:
    held = [(start, end, tiers) for start, end, tiers in told["held"]]
    losses = [Loss(**loss) for loss in told["losses"]]
    return Explanation(told["tokens"], told["matched"], told["resumable"], held, losses)


def _readable(lines: Lines) -> Lines:
    """The lines that a server's answer makes, if it is of the expected form."""

    def read() -> Iterable[str | Text]:
        try:
            return list(lines())
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise RequestError("the answer is not that of a Bough server of this version; see it with --json") from None

    return read


# What is printed.


def _print(told: Any, as_json: bool, lines: Lines) -> None:
    if as_json:
        print(json.dumps(told))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in list(lines()) or ["nothing is held"]:
        console.print(line, markup=False)


def _sections(models: Sequence[StoredModel], parts: Iterable[Iterable[str | Text]]) -> Iterator[str | Text]:
    for model, lines in zip(models, parts, strict=True):
        yield _heading(model)
        yield from lines


def _heading(model: StoredModel) -> Text:
    about = {key: value for key, value in model.about.items() if key != "resume_point"}
    name = printable(about.pop("model", "a model"))
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    unknown = "" if model.needed is not None else "; about.json is gone, so resume points are not known"
    return Text(name, "bold").append(printable(f"  {model.identity}  {facts}{unknown}"), "not bold dim")


def _counted(counters: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in counters.items():
        label = printable(before + name.replace("_", " "))
        if isinstance(value, dict) and value.keys() == {"used", "of"}:
            yield f"{label:<42} {show_bytes(value['used'])} of {show_bytes(value['of'])}"
        elif isinstance(value, dict):
            yield from _counted(value, f"{before}{name.replace('_', ' ')}: ")
        elif name == "bytes":
            yield f"{label:<42} {show_bytes(value)}"
        elif name == "last_used":
            yield f"{label:<42} {'never' if value is None else show_age(value)}"
        elif value is not None:
            yield f"{label:<42} {printable(f'{value:,}' if isinstance(value, int) else value)}"


def _drawn(rows: Sequence[dict[str, Any]], tokenizer: Tokenizer | None) -> Iterator[Text]:
    """The nodes as a tree. An only child stands under its parent; where paths part, they are indented."""
    below: list[list[int]] = [[] for _ in rows]
    path: list[int] = []
    tops: list[int] = []
    for index, row in enumerate(rows):
        del path[row["depth"] - 1 :]
        (below[path[-1]] if path else tops).append(index)
        path.append(index)
    salt, stack = UNSALTED, _branches(tops, "")
    while stack:
        index, lead, indent = stack.pop()
        if rows[index]["salt"] != salt:
            salt = rows[index]["salt"]
            yield Text("no salt" if salt == UNSALTED else f"salt {printable(salt)}", "bold")
        yield Text(lead).append_text(_node(rows[index], tokenizer))
        stack += _branches(below[index], indent)


def _branches(nodes: list[int], indent: str) -> list[tuple[int, str, str]]:
    """Each with what stands before it and what before those below it, the last one first."""
    if len(nodes) == 1:
        return [(nodes[0], indent, indent)]
    marks = [("├─ ", "│  ")] * (len(nodes) - 1) + [("└─ ", "   ")][: len(nodes)]
    return [(node, indent + lead, indent + under) for node, (lead, under) in zip(nodes, marks, strict=True)][::-1]


def _node(row: dict[str, Any], tokenizer: Tokenizer | None) -> Text:
    tiers = " ".join(tier + ("*" if how == "resumes" else "") for tier, how in row["tiers"].items())
    uses = "" if not row["uses"] else f"  {row['uses']} uses"
    if tokenizer is None:
        shown = " ".join(map(str, row["tokens"]))
    else:
        shown = repr(tokenizer.decode([int(token) for token in row["tokens"]], skip_special=False))
    more = " ..." if row["end"] - row["start"] > len(row["tokens"]) else ""
    text = Text(f"[{row['start']}, {row['end']})", "bold").append(f"  {printable(tiers)}", "not bold")
    text.append(f"  {show_bytes(row['bytes'])}  {show_age(row['used'])}{uses}", "not bold dim")
    return text.append(f"  {printable(shown)}{more}", "not bold")
