"""What every command shares: mistakes told in one line, progress bars, sizes read and written."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bough.errors import BoughError, OptionError, RequestError

notes = Console(stderr=True, highlight=False)
INTERRUPTED = 128 + signal.SIGINT  # what a shell expects of a program stopped by Ctrl-C


def friendly(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user did wrong is one line on stderr, never a traceback. Ctrl-C ends quietly."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            if sys.stdout is None:
                raise RequestError("standard output is closed; send it to a file, or to /dev/null")
            command(*args, **kwargs)
        except BoughError as error:
            print_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:  # what is read is checked where it is read: this comes of writing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
            if isinstance(error, BrokenPipeError):  # whoever read our output has seen enough
                raise typer.Exit(0) from None
            print_error(error)
            raise typer.Exit(1) from None

    return run


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, which goes away when done; nothing if stderr is not a terminal."""
    with stages(what) as tell:
        yield lambda done, total: tell(what, done, total)


@contextmanager
def stages(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for one thing after another."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal)
    try:
        progress.start()
        task = progress.add_task(escape(what), total=None)
        yield lambda now, done, total: progress.update(task, description=escape(now), completed=done, total=total)
    finally:
        progress.stop()  # also where Ctrl-C came while it started: it would go on, and stdout would stay its own


def parse_bytes(text: str) -> int:
    """A size as people write it."""
    number, unit = text.strip().rstrip("Bb"), 1
    if number and number[-1].upper() in "KMGT":
        unit = 1024 ** ("KMGT".index(number[-1].upper()) + 1)
        number = number[:-1].rstrip("i")
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise OptionError(f"{text!r} is not a size; write 2G, 500M or a number of bytes") from None


def show_bytes(count: int) -> str:
    """A size as people read it."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def show_age(when: float) -> str:
    """How long ago a time, in seconds since 1970, was."""
    age = max(0.0, time.time() - when)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * seconds:
            return f"{age / seconds:.0f} {unit} ago"
    return f"{age:.0f} s ago"


def printable(value: object) -> str:
    """Text that came from elsewhere, without what could steer a terminal."""
    return "".join(char for char in str(value) if char.isprintable())


def print_error(error: Exception) -> None:
    _print_note("[red]error:[/red]", str(error))


def print_warning(text: str) -> None:
    _print_note("[yellow]warning:[/yellow]", text)


def _print_note(head: str, text: str) -> None:
    notes.print(head, end=" ")
    notes.print(text, markup=False, soft_wrap=True)
