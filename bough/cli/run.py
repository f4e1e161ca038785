"""`bough run` and `bough show`: load a model, answer prompts, chat, or tell what it is made of."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bough import CacheConfig, Engine, SamplingParams
from bough.cli.answers import print_answers
from bough.cli.models import facts, print_table, verify
from bough.cli.stories import tell_stories
from bough.cli.talk import submit, talk
from bough.cli.terminal import bar, friendly, notes, parse_bytes, print_warning, show_bytes
from bough.engine.chat import Reply
from bough.engine.request import Handle
from bough.errors import BadPrompt, EmptyPrompt, ModelError, OptionError
from bough.state.kinds import PageKind
from bough.store.names import Name
from bough.store.store import Store, Stored

BUNDLED = Path(__file__).parent.parent / "bundled"  # a small model that writes stories, and the name it goes by
MOST_TOKENS = 512
DRAFTERS = ("auto", "mtp", "assistant", "ngram")  # words of --draft that are no models

Model = Annotated[
    str | None,
    typer.Argument(
        help="A folder in the Hugging Face layout, a .gguf file, or the name of a stored model;"
        " 'bundled', or none: the model in the box."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Context = Annotated[int | None, typer.Option(help="The most tokens of a sequence; what the model reads by default.")]
CacheBytes = Annotated[str | None, typer.Option(help="Memory for state, e.g. 2G or 500M.", show_default=False)]
HostBytes = Annotated[
    str | None, typer.Option(help="Memory of the host for state that leaves a GPU; 0: none.", show_default=False)
]
DiskCache = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Keep state in this folder too, and find it there next time."),
]
Draft = Annotated[
    str,
    typer.Option(help="Who guesses tokens ahead: auto, mtp, assistant, ngram, a small model (path or name), or none."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compute every prompt from its beginning.")]


@friendly
def run(
    model: Model = None,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="One or several. None: read stdin, or chat if it is a terminal."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt of the chat.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help=f"The most tokens to write; {MOST_TOKENS} if nobody says.", show_default=False
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="0: always the likeliest token.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that sum to p.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below p times the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say how many tokens, how many known, how fast.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    context: Context = None,
    cache_bytes: CacheBytes = None,
    host_bytes: HostBytes = None,
    disk_cache: DiskCache = None,
    no_cache: NoCache = False,
    draft: Draft = "auto",
) -> None:
    """Continue prompts, or chat."""
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**asked)  # a mistake is told before the model is loaded
    cache = cache_config(cache_bytes, host_bytes, disk_cache, no_cache)
    prompts = prompts or _piped(model)
    with loaded(model, device, dtype, context, cache, draft) as engine:
        most = {} if "num_predict" in engine.about.parameters else {"max_tokens": MOST_TOKENS}
        params = replace(engine.defaults, **{**most, **asked})
        if not prompts and model is None:
            tell_stories(engine, params)
            return
        chats = not raw and engine.tokenizer is not None and engine.tokenizer.template is not None
        if system is not None and not chats:
            raise OptionError("--system needs a chat; the model has no chat template, or --raw was given")
        if not prompts:
            talk(engine, engine.chat(system) if chats else None, params, stats)
        else:
            print_answers([_start(engine, text, system, chats, params) for text in prompts], stats)


@friendly
def show(
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    context: Context = None,
    cache_bytes: CacheBytes = None,
    check: Annotated[
        bool, typer.Option("--verify", help="Read all files of a stored model, and say if one is damaged.")
    ] = False,
) -> None:
    """Say what a model is made of, and how many tokens and sequences fit here."""
    stored = find_stored(model)
    if check and stored is None:
        raise OptionError("--verify compares a stored model with what was stored; name one")
    if check and stored is not None:
        verify(stored)
    with loaded(model, device, dtype, context, cache_config(cache_bytes)) as engine:
        with notes.status("measuring a step of made-up tokens"):
            fit = engine.reserve()
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_row("model", f"{engine.name} ({type(engine.model).__name__})")
        for what, told in facts(stored) if stored is not None else ():
            table.add_row(what, Text(told))
        dtype_name = str(engine.model.dtype).removeprefix("torch.")
        table.add_row("weights", f"{show_bytes(fit.weight_bytes)} as {dtype_name} on {engine.model.device}")
        table.add_row("layers", _layers(engine))
        table.add_row("context", f"{engine.context:,} tokens, vocabulary {engine.model.vocab_size:,}")
        for unit in engine.layout.units:
            each = f"of {engine.layout.page_tokens} tokens each" if unit.is_page else "one a sequence"
            table.add_row("state", f"{unit.name} {each}: {show_bytes(unit.nbytes)}")
        table.add_row("memory for state", show_bytes(fit.state_bytes))
        table.add_row(
            "peak of activations", f"{show_bytes(fit.activation_bytes)} in a step of {fit.step_tokens} tokens"
        )
        table.add_row("longest sequence", f"{fit.longest:,} tokens")
        for length, count in fit.sequences.items():
            table.add_row("fit at once", f"{count:,} sequences of {length:,} tokens")
        print_table(table)


def _piped(model: str | None) -> list[str] | None:
    """The prompt when none was given: standard input. None at a terminal; and if empty, for the model in the box."""
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    try:
        text = "" if sys.stdin is None else sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise BadPrompt(f"standard input is not UTF-8 text (see byte {error.start}); convert it first") from None
    except OSError as error:
        raise BadPrompt(f"standard input cannot be read ({error.strerror}); give a prompt instead") from None
    if text.strip():
        return [text]
    if model is not None:
        raise EmptyPrompt("no prompt was given, and standard input is empty; give one or the other")
    return None


def cache_config(
    device_bytes: str | None, host_bytes: str | None = None, disk: str | None = None, none: bool = False
) -> CacheConfig:
    if none and disk is not None:
        raise OptionError("--no-cache and --disk-cache contradict each other; give one of them")
    return CacheConfig(
        enabled=not none,
        device_bytes=None if device_bytes is None else parse_bytes(device_bytes),
        host_bytes=None if host_bytes is None else parse_bytes(host_bytes),
        disk_path=disk,
    )


def find_model(model: str | None) -> Path:
    """Where a model is, by the name it has on the command line: a path, or else the name of a stored one."""
    path = _path(model)
    if os.path.exists(path):
        return path
    stored = find_stored(model)
    if stored is None:
        raise ModelError(
            f"{path} is not there; give a folder with config.json and *.safetensors, a .gguf file,"
            f" or '{BUNDLED.name}' for the model in the box; or store a model and give its name: bough pull HUB_ID,"
            " bough create NAME -f Modelfile"
        )
    stored.require_whole()
    return stored.path


def find_stored(model: str | None) -> Stored | None:
    """The stored model of that name, if it is not a path."""
    name = None if os.path.exists(_path(model)) else Name.maybe(str(model))
    return None if name is None else Store().find(name)


def _drafter(draft: str) -> str | Path | None:
    """The option as the engine takes it: the name of a stored model is the path of it."""
    if draft == "none":
        return None
    stored = None if draft in DRAFTERS else find_stored(draft)
    return draft if stored is None else stored.path


def _path(model: str | None) -> Path:
    return BUNDLED if model in (None, BUNDLED.name) else Path(os.path.expanduser(str(model)))


@contextmanager
def loaded(
    model: str | None,
    device: str,
    dtype: str,
    context: int | None,
    cache: CacheConfig,
    draft: str = "none",
    max_running: int | None = None,
) -> Iterator[Engine]:
    """A model, by the name it has on the command line, until the block ends."""
    path, stored = find_model(model), find_stored(model)
    with bar("loading") as advance, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        engine = Engine.load(
            path,
            device=device,
            dtype=dtype,
            cache=cache,
            context=context,
            max_running=max_running,
            draft=_drafter(draft),
            name=None if stored is None else str(stored.name),
            progress=advance,
        )
    for warning in caught:
        print_warning(str(warning.message))
    try:
        yield engine
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # closing must not be broken off
        with notes.status("writing the cache to disk") if cache.disk_path else nullcontext():
            engine.close()
        signal.signal(signal.SIGINT, before)


def _start(engine: Engine, text: str, system: str | None, chats: bool, params: SamplingParams) -> Handle | Reply:
    if chats:
        return engine.chat(system).stream(text, params)
    return submit(engine, text, params)


def _layers(engine: Engine) -> str:
    counts: dict[str, int] = {}
    for kind in engine.model.kinds:
        if kind is None:
            name = "without state of its own"
        elif isinstance(kind, PageKind):
            name = "full attention" if kind.reach is None else f"attention over {kind.reach + 1} tokens"
        else:
            name = {"Recurrent": "gated delta", "ShortConv": "short convolution"}.get(type(kind).__name__, "slot")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())
