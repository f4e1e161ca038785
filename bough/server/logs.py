"""Logs: one line for each request, with its id and what it cost; as JSON for machines, or for people at a terminal.

Neither prompts nor answers are ever logged.
"""

import json
import logging
import time
from typing import TextIO


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        told = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
        told |= getattr(record, "facts", {})
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told)


class Lines(logging.Formatter):
    """The same for people: the facts of a request after each other."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        text = " ".join(f"{name}={value}" for name, value in facts.items()) if facts else record.getMessage()
        lead = "" if record.levelno <= logging.INFO else record.levelname.lower() + ": "
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return time.strftime("%H:%M:%S ", time.localtime(record.created)) + lead + text + trace


def _is_news(record: logging.LogRecord) -> bool:
    """Not what asyncio says when several pieces were ready for a client that has left."""
    return record.msg != "socket.send() raised exception."


def log_to(stream: TextIO, *, as_json: bool) -> None:
    """Send what the server and the libraries below it have to say to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else Lines())
    for name, level in (("bough", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    logging.getLogger("asyncio").addFilter(_is_news)
