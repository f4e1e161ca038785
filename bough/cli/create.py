"""`bough create` and `bough pull`: bring models into the store."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bough.cli.terminal import friendly, notes, print_warning, show_bytes, stages
from bough.errors import OptionError
from bough.store.create import create as create_model
from bough.store.modelfile import parse_modelfile, read_modelfile
from bough.store.names import Name
from bough.store.pull import HubId
from bough.store.pull import pull as pull_model
from bough.store.store import Store, Stored


@friendly
def create(
    name: Annotated[str, typer.Argument(help="What to call the model: \\[namespace/]name\\[:tag].")],
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="FILE", help="The Modelfile; - reads standard input.")
    ] = "Modelfile",
    quantize: Annotated[
        str | None, typer.Option("--quantize", "-q", help="Make the weights smaller: int8 or int4.", show_default=False)
    ] = None,
    draft_quantize: Annotated[
        str | None,
        typer.Option(
            "--draft-quantize", "--quantize-draft", help="The same for the draft: int8 or int4.", show_default=False
        ),
    ] = None,
) -> None:
    """Make a model of what a Modelfile names, and store it."""
    wanted = Name.parse(name)
    modelfile = parse_modelfile(_stdin(), Path.cwd(), "standard input") if file == "-" else read_modelfile(Path(file))
    for note in modelfile.notes:
        print_warning(note)
    with stages("creating") as tell:
        stored = create_model(Store(), wanted, modelfile, scheme=quantize, draft_scheme=draft_quantize, tell=tell)
    _introduce(stored)


@friendly
def pull(
    repository: Annotated[
        str,
        typer.Argument(metavar="HUB_ID", help="A repository of the Hugging Face hub: organisation/name\\[@revision]."),
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call it; by default as the hub does.", show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Which GGUF file, by its name or a part of it.", show_default=False),
    ] = None,
) -> None:
    """Store a model of the Hugging Face hub. What came before it was broken off is not fetched again."""
    hub = HubId.parse(repository)
    with stages(f"pulling {hub}") as tell:
        stored = pull_model(Store(), hub, name=None if name is None else Name.parse(name), file=file, tell=tell)
    _introduce(stored)


def _stdin() -> str:
    try:
        return "" if sys.stdin is None else sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 text (see byte {error.start}); convert it first") from None


def _introduce(stored: Stored) -> None:
    notes.print(f"[bold]{stored.name.full}[/bold] is stored, {show_bytes(stored.size)};", end=" ")
    notes.print(f"run it with: bough run {stored.name}", markup=False, soft_wrap=True)
