"""Printing answers as they come, and what they cost."""

import queue
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from bough.cli.terminal import bar, notes
from bough.engine.chat import Reply
from bough.engine.request import Handle, Output


def print_answers(asked: Sequence[Handle | Reply], stats: bool) -> None:
    """Print the answers in order, the first as it comes; all of them are worked on together."""
    handles = [each.handle if isinstance(each, Reply) else each for each in asked]
    for index, handle in enumerate(handles):
        if len(handles) > 1:
            notes.print(f"[bold]── {index + 1} of {len(handles)}[/bold]")
        print_pieces(handle, stats)
        if handle.cancelled:
            for other in handles:
                other.cancel()
            raise KeyboardInterrupt


def print_pieces(handle: Handle, stats: bool) -> Output:
    """Print a request's text as it comes. The first Ctrl-C stops the request and keeps what there is.

    With statistics, what a drafter had guessed is green on a terminal.
    """
    began = time.perf_counter()
    first: float | None = None
    try:
        with bar("reading the prompt") as advance:
            piece = _next(handle, advance)
        first = time.perf_counter()
        while piece is not None:
            text = piece.text if handle.has_text else "".join(f"{token} " for token in piece.tokens)
            if stats and piece.drafted and sys.stdout.isatty():
                Console(highlight=False, soft_wrap=True).print(Text(text, style="green"), end="")
            else:
                sys.stdout.write(text)
            sys.stdout.flush()
            piece = _next(handle)
    except KeyboardInterrupt:
        handle.cancel()
    output = handle.result()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stats:
        _print_stats(output, began, first or time.perf_counter())
    return output


def _next(handle: Handle, advance: Callable[[int, int], None] | None = None) -> Any:
    """The next piece, or None at the end. Waits in short naps, so that Ctrl-C gets through and the bar moves."""
    while True:
        try:
            return handle.next_piece(0.1)
        except queue.Empty:
            if advance:
                advance(handle.prefilled, len(handle.request.prompt))


def _print_stats(output: Output, began: float, first: float) -> None:
    usage, now = output.usage, time.perf_counter()
    later = usage.completion_tokens - 1
    speed = f", {later / (now - first):.1f} tokens/s" if later > 0 else ""
    drafts = f" ({usage.drafted_tokens} drafted, {usage.accepted_tokens} accepted)" if usage.drafted_tokens else ""
    notes.print(
        f"[dim]{usage.prompt_tokens} tokens read in {first - began:.2f} s"
        f" ({usage.matched_tokens} matched, {usage.cached_tokens} cached),"
        f" {usage.completion_tokens} written{drafts}{speed}, ended by {output.finish_reason}[/dim]",
        soft_wrap=True,
    )
