"""What `bough run` does when it is asked for nothing: the model in the box tells two stories that begin alike.

Both go on from the end of the same paragraph, which is computed once.
"""

import sys
from dataclasses import replace

from bough import Engine, SamplingParams
from bough.cli.answers import print_pieces
from bough.cli.terminal import notes

OPENING = "Once upon a time, in a small village by the sea,"
PARAGRAPH = 120  # tokens at most


def tell_stories(engine: Engine, params: SamplingParams) -> None:
    """A paragraph, and two ways to go on from it."""
    opening = engine.tokenize(OPENING)
    sys.stdout.write(OPENING)
    length = min(PARAGRAPH, params.max_tokens)
    beginning = print_pieces(
        engine.submit(opening, replace(params, max_tokens=length, stop=("\n\n", *params.stop))), stats=True
    )
    shared = [*opening, *beginning.tokens]
    for title, seed in (("It goes on:", 1), ("Or, from the same paragraph:", 2)):
        notes.print(f"\n[bold]{title}[/bold]")
        other = replace(params, seed=None if params.seed is None else params.seed + seed)
        if params.temperature == 0:
            other = replace(other, temperature=0.8)
        print_pieces(engine.submit(shared, other), stats=True)
