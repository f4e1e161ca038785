"""`bough list`, `rm` and `cp`: the models in the store; and what `bough show` tells of one of them."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bough.cli.terminal import friendly, notes, printable, show_age, show_bytes
from bough.engine.about import About, Weighed
from bough.errors import ModelError
from bough.store.fit import config_of
from bough.store.names import Name
from bough.store.store import Store, Stored

LONGEST = 72  # characters of a text that is shown in part


@friendly
def list_models() -> None:
    """List the models in the store."""
    stored = Store().all()
    if not stored:
        notes.print("nothing is stored; bring a model with: bough pull HUB_ID, or bough create NAME -f Modelfile")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "id", "family", "size", "bits", "draft", "created"):
        table.add_column(column, justify="right" if column in ("size", "bits") else "left", no_wrap=True)
    for each in stored:
        about = each.about
        bits = "" if about.weights is None else f"{about.weights.bits:.1f}"
        row = (each.name.full, each.digest[:12], family(each), show_bytes(each.size), bits, draft(about))
        table.add_row(*row, show_age(each.created))
    print_table(table)


def print_table(table: Table) -> None:
    """On a terminal as wide as that is; for other programs nothing is cut."""
    width = None if sys.stdout.isatty() else 1000
    Console(highlight=False, soft_wrap=True, width=width).print(table)


@friendly
def rm(names: Annotated[list[str], typer.Argument(help="One or several models.")]) -> None:
    """Remove models from the store, and what only they needed."""
    store = Store()
    for name in [Name.parse(each) for each in names]:
        store.remove(name)
        notes.print(f"{name.full} is removed", markup=False, soft_wrap=True)


@friendly
def cp(
    source: Annotated[str, typer.Argument(help="A stored model.")],
    target: Annotated[str, typer.Argument(help="Its second name.")],
) -> None:
    """Give a stored model a second name. Its files are not copied."""
    copied = Store().copy(Name.parse(source), Name.parse(target))
    notes.print(f"{copied.name.full} is stored", markup=False, soft_wrap=True)


def facts(stored: Stored) -> list[tuple[str, str]]:
    """What the store knows of a model, row by row."""
    about = stored.about
    rows = [("stored as", f"{stored.name.full}, {show_bytes(stored.size)}, created {show_age(stored.created)}")]
    rows += [("digest", stored.digest)]
    rows += [("made from", about.source)] if about.source else []
    rows += [("stored weights", weighed(about.weights))] if about.weights else []
    if about.drafter:
        size = f", {weighed(about.draft_weights)}" if about.draft_weights else ""
        source = f"from {about.draft_source}" if about.draft_source else "of its own"
        rows += [("draft", f"{draft(about)} {source}{size}")]
    for name, value in about.parameters.items():
        rows += [("parameter", f"{name} {each!r}") for each in (value if isinstance(value, list | tuple) else [value])]
    rows += [("system", brief(about.system))] if about.system else []
    rows += [("template", brief(about.template))] if about.template else []
    rows += [("license", brief(each)) for each in about.license]
    return [(what, printable(told)) for what, told in rows]


def verify(stored: Stored) -> None:
    """Read all files, and raise if one is not what it was."""
    with notes.status("reading all files"):
        damaged = stored.damaged()
    if damaged:
        raise ModelError(f"{stored.name} is damaged in the store ({', '.join(damaged)}); pull or create it again")


def family(stored: Stored) -> str:
    try:
        return str(config_of(stored.path).get("model_type", "?"))
    except ModelError:
        return "damaged"


def draft(about: About) -> str:
    return {"mtp": "MTP head", "assistant": "assistant", "model": "small model"}.get(about.drafter or "", "")


def weighed(weights: Weighed) -> str:
    scheme = f", {weights.scheme}" if weights.scheme else ""
    size = show_bytes(weights.size)
    return f"{weights.count:,} weights in {size}, {weights.bits:.2f} bits each{scheme}"


def brief(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
