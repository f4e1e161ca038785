"""`python -m bough` and the `bough` command."""

import sys


def main() -> None:
    try:
        from bough.cli import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("error: the command line needs typer and rich; install them with: pip install 'bough[cli]'")
    app()


if __name__ == "__main__":
    main()
