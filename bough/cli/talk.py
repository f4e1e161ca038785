"""A conversation at the terminal: lines that are sent, and commands that fork, rewind and look into the cache.

It knows terminals and chats; how a prompt is computed is the engine's affair.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.markup import escape

from bough import BoughError, Engine, SamplingParams
from bough.cache.extent import salt_key
from bough.cli.answers import print_pieces
from bough.cli.terminal import notes, print_error, printable, show_bytes
from bough.engine.chat import Chat
from bough.engine.request import Handle, Usage
from bough.errors import BadPrompt, OptionError, RequestError
from bough.store.store import home

MOST_LINES, LONGEST_LINE = 1000, 8000  # that the history keeps from one run to the next
MOST_BRANCHES, MOST_NODES = 20, 100_000  # that /tree shows, and looks at
UNSALTED = salt_key(None).hex()[:8]  # as the cache describes it; chats have no salt
EXCERPT = 48  # characters of a text that a list shows


def talk(engine: Engine, chat: Chat | None, params: SamplingParams, stats: bool) -> None:
    """Answer lines until Ctrl-D. Ctrl-C stops a reply, or drops the line being typed; twice in a row it ends.

    Without a chat every line is a prompt of its own.
    """
    conversation, lines = Talk(engine, chat, params, stats), Lines()
    notes.print("[dim]Ctrl-C stops a reply, Ctrl-D ends, /help tells more.[/dim]")
    interrupted = False
    while True:
        try:
            line = lines.read(conversation.prompt)
            interrupted = False
            conversation.take(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            notes.print("\n[dim]Ctrl-D ends, and so does Ctrl-C once more.[/dim]")
        except BoughError as error:
            print_error(error)


def submit(engine: Engine, text: str, params: SamplingParams) -> Handle:
    """Start on a prompt as it is; for a model without a tokenizer it is token ids."""
    return engine.submit(_tokens(text) if engine.tokenizer is None else text, params)


def _tokens(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"the model has no tokenizer, so prompts are token ids like '12 7 99', not {text!r}"
        ) from None


def parse(line: str) -> tuple[str | None, str]:
    """(command, what follows it), or (None, what is to be sent). Only a text of one line can be a command."""
    line = line.rstrip("\r\n")
    if not line.startswith("/") or "\n" in line:
        return None, line
    if line.startswith("//"):
        return None, line[1:]
    name, _, rest = line[1:].partition(" ")
    return name, rest.strip()


class Talk:
    """The chats of one terminal, of which one is being spoken with, and what they cost."""

    def __init__(self, engine: Engine, chat: Chat | None, params: SamplingParams, stats: bool) -> None:
        self.engine, self.params, self.stats = engine, params, stats
        self.chats: dict[str, Chat] = {} if chat is None else {"1": chat}  # one without a name goes by its number
        self.name = "1"
        self.replies, self.usage = 0, Usage()

    @property
    def chat(self) -> Chat:
        return self.chats[self.name]

    @property
    def prompt(self) -> str:
        return f"{self.name}> " if len(self.chats) > 1 else "> "

    def take(self, line: str) -> None:
        """Do what a line asks for."""
        name, text = parse(line)
        if name is None:
            if text.strip():
                self._send(text)
            return
        command = COMMANDS.get(name)
        if command is None:
            there = ", ".join(f"/{each}" for each in COMMANDS)
            raise OptionError(f"/{name} is no command; there are {there}. To send a line that begins with /, write //")
        if command.needs_chat and not self.chats:
            raise OptionError(f"/{name} needs a chat; the model has no chat template, or --raw was given")
        if text and not command.follows:
            raise OptionError(f"/{name} takes nothing after it, not {text!r}")
        command.act(self, text)

    def _send(self, text: str) -> None:
        if self.chats:
            with closing(self.chat.stream(text, self.params)) as reply:
                output = print_pieces(reply.handle, self.stats)
        else:
            output = print_pieces(submit(self.engine, text, self.params), self.stats)
        self.replies += 1
        self.usage = Usage(*(sum(pair) for pair in zip(astuple(self.usage), astuple(output.usage), strict=True)))

    def help(self, _: str) -> None:
        """List the commands."""
        width = max(len(f"/{name} {each.follows}") for name, each in COMMANDS.items())
        for name, each in COMMANDS.items():
            _tell(f"{f'/{name} {each.follows}':{width}}  {each.about}")
        _tell("A line that begins with // is sent with one /; a pasted text of several lines is sent as it is.")

    def fork(self, name: str) -> None:
        """Go on in a second chat with the same past."""
        number = str(len(self.chats) + 1)
        if name and (name.isdecimal() or len(name.split()) != 1 or printable(name) != name):
            raise OptionError(f"{name!r} cannot be the name of a chat; give one word that is no number, or none")
        if name in self.chats:
            raise OptionError(f"there is a chat {name!r} already; give another name, or go there with /switch {name}")
        before, fork = self.name, self.chat.fork()
        self.name = name or number
        self.chats[self.name] = fork
        _tell(f"now in chat {self.name}, a fork of {before} after {_turns(fork)}; /switch {before} goes back")

    def switch(self, wanted: str) -> None:
        """Go to another chat."""
        by_number = {str(number): name for number, name in enumerate(self.chats, 1)}
        name = wanted if wanted in self.chats else by_number.get(wanted)
        if name is None:
            what = f"no chat {wanted!r}" if wanted else "no chat named"
            raise OptionError(f"{what}; there are {', '.join(self.chats)} (/chats tells more, /fork makes another)")
        self.name = name
        _tell(f"now in chat {name}, {_turns(self.chat)}{_last(self.chat)}")

    def list_chats(self, _: str) -> None:
        """List the chats."""
        width = max(map(len, self.chats))
        for number, (name, chat) in enumerate(self.chats.items(), 1):
            mark = "*" if name == self.name else " "
            _tell(f"{mark} {number:2} {name:{width}}  {_turns(chat)}{_last(chat)}")

    def rewind(self, count: str) -> None:
        """Forget turns."""
        if count and not count.isdecimal():
            raise OptionError(f"{count!r} is no number of turns; write /rewind, or /rewind 2")
        try:
            self.chat.rewind(int(count or 1))
        except ValueError:  # Python reads no number of thousands of digits
            raise OptionError("the chat has fewer turns than that") from None
        _tell(f"{_turns(self.chat)} left{_last(self.chat)}")

    def tree(self, _: str) -> None:
        """Show where the cache holds this chat, and what branches off from it."""
        if not self.chat.turns:
            _tell("nothing was said in this chat yet")
            return
        last, tokenizer = self.chat.turns[-1], self.engine.tokenizer
        assert tokenizer is not None, "a chat without a tokenizer"
        tokens = [*last.prompt.tokens, *last.output.tokens]
        _tell(self.engine.cache.explain(tokens).lines()[0])
        branches = 0
        rows = [row for row in self.engine.cache.describe(MOST_NODES) if row["salt"] == UNSALTED]
        for row, on_path in along(rows, tokens):
            branches += not on_path
            if on_path or branches <= MOST_BRANCHES:
                held = ", ".join(tier if how == "resumes" else f"{tier} (passes)" for tier, how in row["tiers"].items())
                text = _excerpt(tokenizer.decode(row["tokens"], skip_special=False))
                mark, span = "*" if on_path else "-", f"[{row['start']}, {row['end']})"
                _tell(f"{'  ' * row['depth']}{mark} {span} {held}  {text}")
        if branches > MOST_BRANCHES:
            _tell(f"  and {branches - MOST_BRANCHES} more branches")

    def show_stats(self, _: str) -> None:
        """Print the totals, and have each reply followed by its own numbers, or no longer."""
        self.stats = not self.stats
        usage, cache = self.usage, self.engine.cache.stats()
        drafts = f" ({usage.drafted_tokens} drafted, {usage.accepted_tokens} accepted)" if usage.drafted_tokens else ""
        known = f"{usage.matched_tokens} matched, {usage.cached_tokens} cached"
        _tell(
            f"replies: {self.replies}; {usage.prompt_tokens} tokens of prompts ({known}),"
            f" {usage.completion_tokens} written{drafts}"
        )
        for tier, held in cache["bytes"].items():
            _tell(f"{tier}: {show_bytes(held['used'])} of {show_bytes(held['of'])}")
        _tell(f"statistics after each reply: {'on' if self.stats else 'off'}")

    def leave(self, _: str) -> None:
        """End, as Ctrl-D does."""
        raise EOFError


@dataclass(frozen=True, slots=True)
class Command:
    """What a line that begins with / does."""

    act: Callable[[Talk, str], None]
    about: str
    follows: str = ""  # what may be written after it
    needs_chat: bool = True


COMMANDS = {
    "help": Command(Talk.help, "this list", needs_chat=False),
    "fork": Command(Talk.fork, "go on in a second chat with the same past", "[name]"),
    "switch": Command(Talk.switch, "go to another chat", "name or number"),
    "chats": Command(Talk.list_chats, "list the chats"),
    "rewind": Command(Talk.rewind, "forget the last turn, or the last n", "[n]"),
    "tree": Command(Talk.tree, "where the cache holds this chat (*), and what branches off (-)"),
    "stats": Command(Talk.show_stats, "the totals; and statistics after each reply, on or off", needs_chat=False),
    "exit": Command(Talk.leave, "end, as Ctrl-D does", needs_chat=False),
}


def along(rows: Sequence[dict[str, Any]], tokens: Sequence[int]) -> list[tuple[dict[str, Any], bool]]:
    """Of the nodes of a tree, parents first, those on the path of these tokens (True) and those that leave it."""
    found: list[tuple[dict[str, Any], bool]] = []
    above: list[bool] = []  # whether the nodes above are on the path
    for row in rows:
        head, start = row["tokens"], row["start"]
        del above[row["depth"] - 1 :]
        follows = above[-1] if above else True
        on_path = follows and list(tokens[start : start + len(head)]) == head
        if on_path or (follows and above):
            found.append((row, on_path))
        above.append(on_path)
    return found


class Lines:
    """Lines that a person types: edited, and found again with the arrow keys, also in the next run.

    That takes a terminal on both sides and a Python with readline; else lines are read as they come, and not kept.
    """

    def __init__(self) -> None:
        self._readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        self._last: str | None = None
        if self._readline is not None:
            self._readline.set_auto_history(False)
            self._readline.parse_and_bind("set enable-bracketed-paste on")  # so that a pasted newline is not Enter
            for line in load_history():
                self._readline.add_history(line)
                self._last = line

    def read(self, prompt: str) -> str:
        """The next line. Raises EOFError at Ctrl-D."""
        try:
            if self._readline is None:
                line = notes.input(f"[bold]{escape(prompt)}[/bold]")
            else:
                line = input(prompt)  # it has to know its prompt to redraw the line
            line.encode()
        except EOFError:
            notes.print()
            raise
        except UnicodeError:
            raise BadPrompt("that is not UTF-8 text; set the terminal and LANG to UTF-8") from None
        if self._readline is not None and line.strip() and line != self._last:
            self._readline.add_history(line)
            self._last = line
            append_history(line)
        return line


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # some builds of Python are without it
        return None
    return readline


def history_path() -> Path:
    return home() / "history"


def load_history() -> list[str]:
    """The lines of earlier runs, oldest first: a JSON string on each line of the file, as they may have newlines.

    No history is no error, and neither is one that cannot be read. Here too the file is cut back to what is kept.
    """
    try:
        path = history_path()
        entries = path.read_bytes().splitlines()
        if len(entries) > MOST_LINES:
            entries = entries[-MOST_LINES:]
            shorter = path.with_name(f"{path.name}.{os.getpid()}")
            _append(shorter, b"".join(entry + b"\n" for entry in entries))
            os.replace(shorter, path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return []
    lines = []
    for entry in entries:
        with suppress(ValueError):
            line = json.loads(entry) if entry.startswith(b'"') else None
            if line:
                lines.append(line)
    return lines


def append_history(line: str) -> None:
    """Keep a line for the next run. If that cannot be done, it is not."""
    if len(line) > LONGEST_LINE:
        return
    with suppress(OSError, RuntimeError):
        path = history_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _append(path, json.dumps(line).encode() + b"\n")


def _append(path: Path, data: bytes) -> None:
    """Add to a file that nobody else may read. Several processes may do so at once."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _turns(chat: Chat) -> str:
    count = len(chat.turns)
    return "1 turn" if count == 1 else f"{count} turns"


def _last(chat: Chat) -> str:
    return f", the last {_excerpt(str(chat.turns[-1].said['content']))}" if chat.turns else ""


def _excerpt(text: str) -> str:
    line = printable(" ".join(text.split()))
    return f'"{line}"' if len(line) <= EXCERPT else f'"{line[:EXCERPT]}…"'


def _tell(text: str) -> None:
    notes.print(text, markup=False, soft_wrap=True)
