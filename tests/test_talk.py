"""The terminal chat: its commands, and the keys of a person at a terminal."""

import io
import os
import re
import readline
import select
import stat
import subprocess
import sys
import time
from contextlib import closing, suppress
from itertools import pairwise

import pytest
from rich.console import Console
from rich.live import Live

from bough import Engine, SamplingParams
from bough.cli import talk as talking
from bough.cli import terminal as shown
from bough.cli.talk import COMMANDS, Lines, Talk, along, append_history, history_path, load_history, parse
from bough.errors import BoughError

GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("/help", ("help", "")),
        ("/fork  poem ", ("fork", "poem")),
        ("/", ("", "")),
        ("/rewind 2\n", ("rewind", "2")),  # pasted together with its newline
        ("//etc is a folder", (None, "/etc is a folder")),
        ("///", (None, "//")),
        (" /help", (None, " /help")),
        ("and /help", (None, "and /help")),
        ("// a comment\nint x;", (None, "// a comment\nint x;")),
        ("/help\nme", (None, "/help\nme")),
        ("", (None, "")),
    ],
)
def test_parse(line, parsed):
    assert parse(line) == parsed


@pytest.fixture(scope="module")
def engine(hybrid_folder):
    with Engine.load(hybrid_folder, dtype="float32") as engine:
        yield engine


@pytest.fixture
def talk(engine):
    return Talk(engine, engine.chat(), GREEDY, stats=False)


def said(talk: Talk) -> list[str]:
    return [str(turn.said["content"]) for turn in talk.chat.turns]


def test_forks_go_their_own_ways(talk, capsys):
    for line in ("the fox", "/fork", "old bear", "/fork poem", "the dog", "/switch 1", "the forest"):
        talk.take(line)
    capsys.readouterr()
    talk.take("/chats")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("*  1 1") and "2 turns" in first and '"the forest"' in first
    assert second.startswith("   2 2") and '"old bear"' in second
    assert third.startswith("   3 poem") and "3 turns" in third
    assert said(talk) == ["the fox", "the forest"] and talk.prompt == "1> "
    for wanted in ("3", "poem"):
        talk.take(f"/switch {wanted}")
        assert said(talk) == ["the fox", "old bear", "the dog"] and talk.prompt == "poem> "


def test_a_rewound_chat_answers_as_if_nothing_had_been(talk, engine):
    for line in ("the fox", "old bear", "the dog", "/rewind 2", "in the dark"):
        talk.take(line)
    other = engine.chat()
    expected = [other.send(text, GREEDY).tokens for text in ("the fox", "in the dark")]
    assert [turn.output.tokens for turn in talk.chat.turns] == expected
    talk.take("/rewind")
    assert said(talk) == ["the fox"]


def test_two_slashes_are_sent_as_one(talk):
    talk.take("//tmp")
    assert said(talk) == ["/tmp"]


def test_tree(talk, capsys):
    talk.take("/tree")
    assert "nothing was said" in capsys.readouterr().err
    for line in ("a tree of words", "/fork", "the lazy dog", "/switch 1", "a very old bear"):
        talk.take(line)
    capsys.readouterr()
    talk.take("/tree")
    head, *rows = capsys.readouterr().err.splitlines()
    tokens, matched = map(int, re.match(r"(\d+) tokens: (\d+) matched", head).groups())
    assert matched == tokens - 1  # the last token was never read
    path = [tuple(map(int, re.search(r"\[(\d+), (\d+)\)", row).groups())) for row in rows if row.strip()[0] == "*"]
    assert path[0][0] == 0 and path[-1][1] >= matched
    assert all(left[1] == right[0] for left, right in pairwise(path))
    assert any(row.strip()[0] == "-" for row in rows) and "device" in head + rows[0]


def test_along_is_the_path_and_what_leaves_it():
    def row(depth, start, tokens):
        return {"depth": depth, "start": start, "tokens": tokens}

    other = row(1, 0, [9])
    root, left, below_left, path, end = (
        row(1, 0, [1, 2]),
        row(2, 2, [7]),
        row(3, 3, [4]),
        row(2, 2, [3]),
        row(3, 3, [4]),
    )
    right, below_right = row(2, 2, [8]), row(3, 3, [5])
    rows = [other, root, left, below_left, path, end, right, below_right]
    assert along(rows, [1, 2, 3, 4]) == [(root, True), (left, False), (path, True), (end, True), (right, False)]
    assert along(rows, [5]) == []


def test_stats(talk, capsys):
    talk.take("the fox")
    talk.take("the fox")
    assert "tokens read" not in capsys.readouterr().err
    talk.take("/stats")
    told = capsys.readouterr().err
    assert "replies: 2" in told and "device: " in told and "reply: on" in told
    usages = [turn.output.usage for turn in talk.chat.turns]
    assert f"{sum(usage.prompt_tokens for usage in usages)} tokens of prompts" in told
    talk.take("the dog")
    assert "tokens read" in capsys.readouterr().err
    talk.take("/stats")
    assert "reply: off" in capsys.readouterr().err and not talk.stats


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("/dance", "/rewind"),
        ("/etc/passwd", "write //"),
        ("/", "/help"),
        ("/fork 7", "no number"),
        ("/fork two words", "one word"),
        ("/fork \x1b[2J", "one word"),
        ("/switch", "/chats"),
        ("/switch 9", "/chats"),
        ("/rewind 1", "0 turns"),
        ("/rewind -1", "/rewind 2"),
        ("/rewind " + "9" * 5000, "fewer turns"),
        ("/chats please", "takes nothing"),
    ],
)
def test_mistakes_have_a_remedy(talk, line, remedy):
    with pytest.raises(BoughError) as caught:
        talk.take(line)
    assert remedy in str(caught.value)
    assert list(talk.chats) == ["1"]


def test_a_name_is_given_once(talk):
    talk.take("/fork poem")
    with pytest.raises(BoughError, match="another name"):
        talk.take("/fork poem")


def test_without_a_chat(engine, capsys):
    talk = Talk(engine, None, GREEDY, stats=False)
    talk.take("the fox")
    assert capsys.readouterr().out == engine.generate("the fox", GREEDY).text + "\n"
    for name, command in COMMANDS.items():
        if command.needs_chat:
            with pytest.raises(BoughError, match="needs a chat"):
                talk.take(f"/{name}")
    talk.take("/stats")
    assert "replies: 1" in capsys.readouterr().err
    talk.take("/help")
    told = capsys.readouterr().err
    assert all(f"/{name} " in told for name in COMMANDS)
    with pytest.raises(EOFError):
        talk.take("/exit")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_history_is_private_and_bounded(home, monkeypatch):
    monkeypatch.setattr(talking, "MOST_LINES", 3)
    monkeypatch.setattr(talking, "LONGEST_LINE", 20)
    assert load_history() == []
    for line in ("one", "two\nlines", "é", "four", "x" * 21):
        append_history(line)
    path = history_path()
    assert path == home / "history" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert load_history() == ["two\nlines", "é", "four"]
    assert len(path.read_text().splitlines()) == 3 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(home) == ["history"]


def test_damaged_or_missing_history_is_no_error(home, monkeypatch):
    append_history("kept")
    with history_path().open("ab") as file:
        file.write(b'\n"cut\n[[[[\nplain\n\xff\xfe\n"\xff"\n7\n""\n')
    assert load_history() == ["kept"]
    monkeypatch.setenv("BOUGH_HOME", os.devnull)
    append_history("lost")
    assert load_history() == []


def test_without_a_terminal_nothing_is_kept(home, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed\n\udcff\n"))
    lines = Lines()
    assert lines.read("> ") == "typed"
    with pytest.raises(BoughError, match="UTF-8"):
        lines.read("> ")
    with pytest.raises(EOFError):
        lines.read("> ")
    assert not home.exists()


class Terminal:
    """A process with a terminal on all its sides."""

    def __init__(self, *command: str, home: str) -> None:
        self.side, theirs = os.openpty()
        # A session of its own, so that its terminal sends Ctrl-C to it; and a term that knows bracketed paste.
        start = "import fcntl, termios, bough.__main__ as it; fcntl.ioctl(0, termios.TIOCSCTTY, 0); it.main()"
        environment = os.environ | {"BOUGH_HOME": home, "TERM": "xterm", "INPUTRC": os.devnull, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *command],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def expect(self, text: str, seconds: float = 60) -> str:
        """What it shows up to this text, and forget it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.side], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.side, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    raise AssertionError(f"{text!r} did not come: {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.side, keys.encode())

    def press(self, keys: str, text: str, again: str) -> None:
        """Press keys that lead to a text. Python may sit on a Ctrl-C that came as readline began, until Enter."""
        self.type(keys)
        try:
            self.expect(text, 10)
        except AssertionError:
            self.type(again)
            self.expect(text)

    def leave(self) -> int:
        with suppress(OSError, AssertionError):
            self.expect("\0", 20)  # drain it until it ends
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.side)


UP, LEFT, PASTE, PASTED, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x1b[200~", "\x1b[201~", "\x03", "\x04"
PROMPT = "\x1b[?2004h> "  # which a tiny model does not say by chance

needs_readline = pytest.mark.skipif("GNU readline" not in (readline.__doc__ or ""), reason="needs GNU readline")


@needs_readline
def test_keys_at_a_terminal(hybrid_folder, home):
    command = ["run", str(hybrid_folder), "-t", "0", "-n", "4", "--dtype", "float32"]
    append_history("of the last run")
    with closing(Terminal(*command, home=str(home))) as terminal:
        terminal.expect(PROMPT)
        terminal.type("the fix" + LEFT + "\b" + "o\r")  # Left, and the i becomes an o
        terminal.expect(PROMPT)
        terminal.type(f"{PASTE}old\nbear{PASTED}\r")
        terminal.expect(PROMPT)
        terminal.type("/chats\r")
        terminal.expect('2 turns, the last "old bear"')
        terminal.expect(PROMPT)
        terminal.type("/fork\r")
        terminal.expect(PROMPT.replace("> ", "2> "))
        terminal.press("half a li" + CTRL_C, "Ctrl-D ends", "\r")
        terminal.expect(PROMPT.replace("> ", "2> "))
        terminal.type(UP * 5 + "!\r")
        terminal.expect(PROMPT.replace("> ", "2> "))
        terminal.type("/exit\r")
        assert terminal.leave() == 0
    assert load_history() == ["of the last run", "the fox", "old\nbear", "/chats", "/fork", "of the last run!", "/exit"]


def test_ctrl_c_while_a_bar_starts_ends_it(monkeypatch):
    refresh, stdout, interrupts = Live.refresh, sys.stdout, [KeyboardInterrupt]

    def interrupted(self):
        if interrupts:
            raise interrupts.pop()
        refresh(self)

    monkeypatch.setattr(Live, "refresh", interrupted)
    monkeypatch.setattr(shown, "notes", Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyboardInterrupt), shown.bar("reading"):
        pass
    assert sys.stdout is stdout and not interrupts
    with shown.bar("reading") as advance:
        advance(1, 2)


@needs_readline
def test_ctrl_c_stops_a_reply_and_not_the_chat(hybrid_folder, home):
    command = ["run", str(hybrid_folder), "-t", "5", "-n", "480", "--dtype", "float32", "--stats"]
    with closing(Terminal(*command, home=str(home))) as terminal:
        terminal.expect(PROMPT)
        terminal.type("the fox\r")
        terminal.expect("reading the prompt")
        terminal.type(CTRL_C)
        terminal.expect(PROMPT)
        terminal.press("/chats\r", "1 turn, the last", "/chats\r")
        terminal.expect(PROMPT)
        terminal.press(CTRL_C, "once more", "\r")
        terminal.expect(PROMPT)
        time.sleep(0.3)
        terminal.type(CTRL_C)
        assert terminal.leave() == 130
