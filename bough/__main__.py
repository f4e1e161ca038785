"""`python -m bough` and the `bough` command."""

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT  # what a shell expects of a program stopped by Ctrl-C


def main() -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # an import that is broken off tells of it at length
    try:
        from bough.cli import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("error: the command line needs typer and rich; install them with: pip install 'bough[cli]'")
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all that is left is to end


if __name__ == "__main__":
    main()
