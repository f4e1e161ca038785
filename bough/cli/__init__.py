"""The command line. Text goes to stdout and everything else to stderr, so output pipes; colours only decorate."""

import typer

from bough import __version__
from bough.cli import cache
from bough.cli.create import create, pull
from bough.cli.models import cp, list_models, rm
from bough.cli.run import BUNDLED, run, show
from bough.cli.serve import serve
from bough.cli.stories import OPENING

__all__ = ["BUNDLED", "OPENING", "app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Run hybrid language models so that no token is computed twice that need not be.",
)
app.command(
    epilog="Examples: [bold]bough run ./model 'Why is the sky blue?'[/bold]   [bold]cat q.txt | bough run m.gguf[/bold]"
)(run)
app.command(epilog="Example: [bold]bough show ./model --context 32768[/bold]")(show)
app.command(
    epilog="Examples: [bold]bough serve ./model --disk-cache ~/bough-cache[/bold]"
    "   [bold]bough serve m.gguf --host 0.0.0.0 --api-key secret[/bold]"
    "   then: [bold]curl http://127.0.0.1:8080/v1/models[/bold]"
)(serve)
app.command(epilog="Example: [bold]bough create mine -f Modelfile --quantize int8[/bold]")(create)
app.command(epilog="Example: [bold]bough pull Qwen/Qwen3-0.6B[/bold]   then: [bold]bough run Qwen/Qwen3-0.6B[/bold]")(
    pull
)
app.command("list")(list_models)
app.command()(rm)
app.command()(cp)
app.add_typer(cache.app, name="cache")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
