"""`bough serve`: answer OpenAI's, Ollama's and Anthropic's clients over HTTP."""

import sys
from typing import Annotated

import typer

from bough import Engine
from bough.cli.run import (
    CacheBytes,
    Context,
    Device,
    DiskCache,
    Draft,
    Dtype,
    HostBytes,
    Model,
    NoCache,
    cache_config,
    loaded,
)
from bough.cli.terminal import friendly, notes, parse_bytes, show_bytes
from bough.errors import OptionError
from bough.store.store import Store


@friendly
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8080,
    name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; several: it goes by each.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="BOUGH_API_KEY",
            help="Ask for this key; with several, each has a cache of its own.",
            show_default=False,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let pages of this origin ask, e.g. http://localhost:3000."),
    ] = None,
    max_body: Annotated[str, typer.Option(help="The largest body of a request.")] = "32M",
    max_prompt: Annotated[int | None, typer.Option(help="The most tokens of a prompt; the context by default.")] = None,
    queue: Annotated[int, typer.Option(help="How many requests may wait for their turn.")] = 256,
    grace: Annotated[float, typer.Option(help="Seconds that running requests get when the server stops.")] = 30.0,
    log_json: Annotated[
        bool | None, typer.Option("--log-json/--log-text", help="Logs for machines. By default: unless at a terminal.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    context: Context = None,
    cache_bytes: CacheBytes = None,
    host_bytes: HostBytes = None,
    disk_cache: DiskCache = None,
    no_cache: NoCache = False,
    draft: Draft = "auto",
    max_running: Annotated[
        int | None, typer.Option(help="How many requests are worked on at once.", show_default=False)
    ] = None,
) -> None:
    """Serve a model over HTTP, to OpenAI's clients and to others."""
    try:
        from bough.server import logs, run
        from bough.server.settings import Settings
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise OptionError(f"serving needs {error.name}; install it with: pip install 'bough[server]'") from None
    settings = Settings(
        names=tuple(name or ()),
        api_keys=tuple(api_key or ()),
        origins=tuple(cors or ()),
        body_bytes=parse_bytes(max_body),
        prompt_tokens=max_prompt,
        queue=queue,
        grace=grace,
        store=Store().folder,
    )
    cache = cache_config(cache_bytes, host_bytes, disk_cache, no_cache)
    with run.bind(host, port) as taken, loaded(model, device, dtype, context, cache, draft, max_running) as engine:
        _introduce(engine)
        logs.log_to(sys.stderr, as_json=not notes.is_terminal if log_json is None else log_json)
        run.serve(engine, settings, taken, lambda: _tell("serving", f"{run.address(taken)}/v1 (Ctrl-C ends it)"))


def _introduce(engine: Engine) -> None:
    """What is served, and what it takes."""
    with notes.status("measuring a step of made-up tokens"):
        fit = engine.reserve()
    dtype = str(engine.model.dtype).removeprefix("torch.")
    _tell("model", f"{engine.name}, {show_bytes(fit.weight_bytes)} as {dtype} on {engine.model.device}")
    most = " or ".join(f"{count:,} sequences of {length:,} tokens" for length, count in fit.sequences.items())
    _tell("fits", f"{most}; {show_bytes(fit.activation_bytes)} beside them while computing")
    tiers = engine.cache.stats()["bytes"]
    _tell("tiers", ", ".join(f"{tier} {show_bytes(held['of'])}" for tier, held in tiers.items()))


def _tell(what: str, text: str) -> None:
    notes.print(f"[bold]{what:<8}[/bold]", end="")
    notes.print(text, markup=False, soft_wrap=True)
