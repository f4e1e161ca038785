"""The prefix cache as its users meet it: chats that resume, explanations, and `bough cache`."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bough import CacheConfig, Engine, SamplingParams
from bough.cache.extent import salt_key
from bough.cli import app
from bough.cli.folder import stored_models
from bough.engine.chat import Chat

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SYSTEM = "the quick brown fox and the lazy dog are in the dark forest"
STRIPPED = (  # leaves out how earlier replies began, as others do with their thinking
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content[3:] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def engine(hybrid_folder) -> Iterator[Engine]:
    with Engine.load(hybrid_folder, dtype="float32") as engine:
        yield engine
        engine.check()


@pytest.fixture(scope="module")
def cold(hybrid_folder) -> Iterator[Engine]:
    """The same model, which keeps nothing."""
    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(enabled=False)) as engine:
        yield engine


def prompt_of(chat: Chat) -> list[int]:
    """The prompt of the last turn."""
    return chat.turns[-1].prompt.tokens


# Chats.


def test_chats_share_their_system_prompt(engine, cold):
    first = engine.chat(system=SYSTEM)
    first.send("jumps over the fox", GREEDY)
    end = len(engine.tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"))
    second = engine.chat(system=SYSTEM)
    out = second.send("an old bear", GREEDY)
    assert end <= out.usage.cached_tokens <= out.usage.matched_tokens
    assert out.tokens == cold.chat(system=SYSTEM).send("an old bear", GREEDY).tokens


def test_turns_forks_and_takebacks_resume(engine, cold):
    chat, plain = engine.chat(system=SYSTEM), cold.chat(system=SYSTEM)
    opening = chat.send("jumps over the fox", GREEDY)
    assert opening.tokens == plain.send("jumps over the fox", GREEDY).tokens
    written = len(prompt_of(chat)) + len(opening.tokens)
    fork, other, third = chat.fork(), chat.fork(), chat.fork()

    turn = chat.send("and the dog", GREEDY)
    assert turn.usage.cached_tokens == written - 1  # the last token was written, but not read yet
    assert turn.tokens == plain.send("and the dog", GREEDY).tokens
    again = fork.send("and the dog", GREEDY)
    assert (again.tokens, again.usage.cached_tokens) == (turn.tokens, len(prompt_of(fork)) - 1)

    reply_end = written + len(engine.tokenizer.encode("<|im_end|>\n"))
    left = other.send("very old bear", GREEDY)
    assert left.usage.cached_tokens == reply_end
    resumed = third.send("very old fox", GREEDY)
    assert resumed.usage.cached_tokens >= left.usage.matched_tokens > reply_end  # the one before left a point there

    chat.rewind()
    plain.rewind()
    back = chat.send("very old bear", GREEDY)
    assert back.usage.cached_tokens == len(prompt_of(chat)) - 1
    assert back.tokens == left.tokens == plain.send("very old bear", GREEDY).tokens


@pytest.fixture
def stripping_folder(hybrid_folder, tmp_path) -> Path:
    folder = shutil.copytree(hybrid_folder, tmp_path / "stripping")
    (folder / "chat_template.jinja").write_text(STRIPPED)
    return folder


def test_a_template_that_strips_resumes_before_the_reply(stripping_folder):
    said = ["the quick fox", "jumps over", "the lazy dog"]
    with (
        Engine.load(stripping_folder, dtype="float32") as engine,
        Engine.load(stripping_folder, dtype="float32", cache=CacheConfig(enabled=False)) as cold,
    ):
        chat, plain = engine.chat(), cold.chat()
        for text in said:
            out = chat.send(text, GREEDY)
            assert out.tokens == plain.send(text, GREEDY).tokens
            if len(chat.turns) > 1:
                question = chat.template.render(chat.messages[:-3], add_generation_prompt=False)
                assert out.usage.cached_tokens == len(engine.tokenizer.encode(question))


def test_boundaries_grow_with_the_chat(engine):
    """They are those that a search of the whole chat finds, where the template changes nothing said before."""
    chat = engine.chat(system=SYSTEM)
    for text in ("the fox", "the dog", "a bear", "the dark forest"):
        chat.send(text, GREEDY)
        last = chat.turns[-1]
        messages = chat.messages[:-1]
        assert set(chat.template.boundaries(last.prompt, messages)) == set(last.boundaries)


def test_a_long_chat_costs_two_more_renders_a_turn(engine, monkeypatch):
    chat, renders, counts = engine.chat(), [], []
    render = chat.template._render
    monkeypatch.setattr(chat.template, "_render", lambda *args: renders.append(1) or render(*args))
    for _ in range(12):
        chat.send("a fox", SamplingParams(max_tokens=1, temperature=0))
        counts.append(len(renders))
        renders.clear()
    assert max(counts[1:]) == 3


def test_no_boundaries_where_every_length_resumes(llama_folder, cold):
    with Engine.load(llama_folder, dtype="float32") as plain:
        assert not plain.cache.places_points and not cold.cache.places_points
        chat = plain.chat(system=SYSTEM)
        chat.send("the fox", GREEDY)
        assert chat.turns[-1].boundaries == ()
        out = chat.send("the dog", GREEDY)
        assert out.usage.cached_tokens == out.usage.matched_tokens > 0


# Explanations.


def reasons(told) -> list[tuple[str, int, int]]:
    return [(loss.reason, loss.start, loss.end) for loss in told.losses]


def test_text_that_was_known_in_other_tokens(engine):
    tokens = engine.tokenizer.encode
    same = [token for char in "quick brown" for token in tokens(char)]  # not as the tokenizer would
    assert len(same) > len(tokens("quick brown"))
    engine.generate([*tokens("the "), *same, *tokens(" fox")], GREEDY)
    asked = [*tokens("the "), *tokens("quick brown"), *tokens(" fox"), *tokens(" in the dark forest")]
    told = engine.cache.explain(asked)
    start = told.matched
    assert start <= len(tokens("the ")) + 1
    known = len(tokens("the ")) + len(tokens("quick brown")) + len(tokens(" fox"))
    assert [each for each in reasons(told) if each[0] != "no resume point"] == [
        ("retokenised", start, known),
        ("never seen", known, len(asked) - 1),
        ("last token", len(asked) - 1, len(asked)),
    ]
    assert any("retokenised: the text is known, in other tokens" in line for line in told.lines())


def test_a_cached_text_that_ends_within_a_token(engine):
    tokens = engine.tokenizer.encode
    engine.generate([*tokens("fox"), *tokens(" qui")], SamplingParams(max_tokens=0))
    asked = tokens("fox quick bear dog")
    told = engine.cache.explain(asked)
    assert told.matched < len(asked)
    assert "retokenised" in {loss.reason for loss in told.losses}


def test_other_text_is_never_seen(engine):
    engine.generate("the quick brown fox", GREEDY)
    told = engine.cache.explain("the quick dog in the dark forest")
    assert told.matched > 0
    assert {reason for reason, _, _ in reasons(told)} <= {"no resume point", "never seen", "last token"}
    assert "never seen" in {reason for reason, _, _ in reasons(told)}


def test_explain_takes_text_and_tokens(engine):
    out = engine.generate("the quick brown fox", GREEDY)
    prompt = engine.tokenize("the quick brown fox")
    told = engine.cache.explain("the quick brown fox")
    assert told == engine.cache.explain(prompt) == engine.cache.explain(tuple(prompt))
    assert (told.matched, told.resumable) == (len(prompt), len(prompt) - 1)
    assert reasons(told) == [("last token", len(prompt) - 1, len(prompt))]
    assert told.lines()[0].startswith(f"{len(prompt)} tokens: {len(prompt)} matched, {len(prompt) - 1} resumable")
    salted = engine.cache.explain(prompt, cache_salt="else")
    assert salted.matched == 0 and salted.losses[0].reason == "salted"
    assert [loss.reason for loss in engine.cache.explain([5]).losses] == ["too short"]
    longer = engine.cache.explain([*prompt, *out.tokens, 7, 7])
    assert longer.resumable == len(prompt) + len(out.tokens) - 1  # the last one was not read


def test_models_without_a_tokenizer_explain_tokens(llama_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama_folder / name)
    with Engine.load(tmp_path, dtype="float32") as bare:
        bare.generate([5, 6, 7], GREEDY)
        assert bare.cache.explain([5, 6, 9, 9]).matched == 2


# The command line.


def bough(*arguments) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def served(hybrid_folder, tmp_path_factory) -> Iterator[tuple[Engine, Path]]:
    """An engine that has answered a few prompts, and its folder, which it goes on using."""
    disk = tmp_path_factory.mktemp("disk")
    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(disk_path=disk)) as engine:
        for text in ("the fox", "the dog"):
            engine.chat(system=SYSTEM).send(text, GREEDY)
        engine.generate("a very old bear", SamplingParams(max_tokens=4, temperature=0, cache_salt="mine"))
        engine.cache.flush()
        yield engine, disk


def test_a_folder_in_use_as_the_engine_sees_it(served):
    engine, disk = served
    (model,) = stored_models(disk)
    rows, seen = model.describe(1000), engine.cache.describe()
    keys = ("depth", "start", "end", "tokens", "salt")
    assert sorted([each[key] for key in keys] for each in rows) == sorted([each[key] for key in keys] for each in seen)
    on_disk = {(each["start"], tuple(each["tokens"])): each["tiers"]["disk"] for each in seen}
    assert on_disk == {(each["start"], tuple(each["tokens"])): each["tiers"]["disk"] for each in rows}
    assert model.stats()["bytes"] == sum(each["bytes"] for each in rows)
    for text in ("the fox and the dog", "a very old bear", SYSTEM):
        tokens = engine.tokenize(text)
        told, expected = model.explain(tokens, salt_key(None)), engine.cache.explain(tokens)
        assert (told.matched, told.resumable) == (expected.matched, expected.resumable)


def test_tree_of_a_folder(served, hybrid_folder):
    _, disk = served
    done = bough("cache", "tree", "--disk", disk)
    assert done.exit_code == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert "dtype float32, page_tokens 32" in lines[0]
    assert sum("disk*" in line for line in lines) >= 5
    assert any(line.startswith("├─ [") for line in lines) and any(line.startswith("salt ") for line in lines)
    assert all("KiB" in line and "ago" in line for line in lines if "disk" in line)
    texts = bough("cache", "tree", "--disk", disk, "--model", hybrid_folder).stdout
    assert "<|im_start|>system" in texts and "a very" in texts
    (found,) = json.loads(bough("cache", "tree", "--disk", disk, "--json").stdout)
    assert found["about"]["page_tokens"] == 32 and found["nodes"][0]["start"] == 0
    assert len(json.loads(bough("cache", "tree", "--disk", disk, "--json", "--most", 2).stdout)[0]["nodes"]) == 2


def test_stats_of_a_folder(served):
    _, disk = served
    (found,) = json.loads(bough("cache", "stats", "--disk", disk, "--json").stdout)
    files = list(disk.glob("*/*.safetensors"))
    assert found["files"] == len(files) and found["bytes"] == sum(path.stat().st_size for path in files)
    assert found["resume_points"] > 0 and found["unusable_files"] == found["stranded_files"] == 0
    told = bough("cache", "stats", "--disk", disk).stdout
    assert f"{found['tokens']}\n" in told and "resume points" in told and "last used" in told


def test_explain_a_folder(served, hybrid_folder):
    engine, disk = served
    asked = ["cache", "explain", "the fox", "--disk", disk, "--model", hybrid_folder, "--system", SYSTEM]
    done = bough(*asked)
    assert done.exit_code == 0, done.stderr
    prompt = engine.chat(system=SYSTEM).template.prompt(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "the fox"}]
    )
    expected = engine.cache.explain(prompt.tokens)
    assert expected.resumable == len(prompt.tokens) - 1
    assert done.stdout.splitlines()[1] == expected.lines()[0]
    (found,) = json.loads(bough(*asked, "--json").stdout)
    assert (found["matched"], found["resumable"]) == (expected.matched, expected.resumable)
    tokens = ",".join(map(str, prompt.tokens))
    (same,) = json.loads(bough("cache", "explain", "--tokens", tokens, "--disk", disk, "--json").stdout)
    assert same == found
    mine = engine.tokenize("a very old bear")
    told = bough(
        "cache", "explain", "a very old bear", "--raw", "--disk", disk, "--model", hybrid_folder, "--salt", "mine"
    )
    assert f"{len(mine)} tokens: {len(mine)} matched, {len(mine) - 1} resumable" in told.stdout
    told = bough("cache", "explain", "a very old bear", "--raw", "--disk", disk, "--model", hybrid_folder)
    assert "salted" in told.stdout


def test_damaged_and_missing_files(served, tmp_path):
    _, disk = served
    copy = shutil.copytree(disk, tmp_path / "copy")
    first, *_ = sorted(copy.glob("*/*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    (about,) = copy.glob("*/about.json")
    about.write_text("[")
    (found,) = json.loads(bough("cache", "stats", "--disk", copy, "--json").stdout)
    assert found["unusable_files"] == 1 and found["about"] == {}
    told = bough("cache", "tree", "--disk", copy)
    assert told.exit_code == 0 and "about.json is gone" in told.stdout and "disk*" not in told.stdout
    (tmp_path / "empty").mkdir()
    assert bough("cache", "tree", "--disk", tmp_path / "empty").stdout == "nothing is held\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tree"], "--disk"),
        (["tree", "--disk", "/nowhere"], "/nowhere cannot be read"),
        (["tree", "--disk", "{disk}", "--url", "http://127.0.0.1:1"], "name one"),
        (["tree", "--disk", "{disk}", "--model", "/nowhere"], "not there"),
        (["stats", "--url", "127.0.0.1:1"], "http://"),
        (["stats", "--url", "http://127.0.0.1:1"], "does not answer"),
        (["stats", "--url", "http://127.0.0.1:99999"], "does not answer"),
        (["explain", "--disk", "{disk}"], "a prompt or --tokens"),
        (["explain", "the", "--tokens", "1", "--disk", "{disk}"], "a prompt or --tokens"),
        (["explain", "the", "--disk", "{disk}"], "--model"),
        (["explain", "the", "--system", "x", "--disk", "{disk}"], "--system"),
        (["explain", "--tokens", "1,x", "--disk", "{disk}"], "1,2,3"),
        (["explain", "--tokens", "-1", "--disk", "{disk}"], "1,2,3"),
        (["explain", "", "--raw", "--model", "{model}", "--disk", "{disk}"], "empty"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(served, hybrid_folder, arguments, said):
    done = bough("cache", *(each.format(disk=served[1], model=hybrid_folder) for each in arguments))
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["tree", "stats", "explain"])
def test_help_has_examples(command):
    told = bough("cache", command, "--help")
    assert told.exit_code == 0 and "Examples: bough cache" in told.stdout


def test_output_pipes(served):
    command = f"{sys.executable} -m bough cache tree --disk {served[1]} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and "page_tokens 32" in done.stdout and "\x1b" not in done.stdout


@pytest.fixture
def server(served) -> Iterator[str]:
    """What a server of the engine answers about its cache, in short."""
    engine, _ = served

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {"/cache": engine.cache.describe, "/cache/stats": engine.cache.stats, "/odd/cache/stats": list}
            answers["/foreign/cache"] = lambda: [{"depth": 1}]
            path = self.path.partition("?")[0]
            if path in answers:
                self.answer(json.dumps(answers[path]()).encode())
            elif path.startswith("/text"):
                self.answer(b"<html>")
            else:
                self.send_error(404, "not \x1b[31mhere")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/cache/explain" and asked.keys() == {"prompt", "cache_salt"}
            self.answer(json.dumps(asdict(engine.cache.explain(**asked))).encode())

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_running_server(served, server, hybrid_folder):
    engine, _ = served
    assert json.loads(bough("cache", "tree", "--url", server, "--json").stdout) == engine.cache.describe()
    drawn = bough("cache", "tree", "--url", server)
    assert drawn.exit_code == 0 and drawn.stdout.count("device* disk*") >= 5, drawn.stderr
    counters = json.loads(bough("cache", "stats", "--url", server, "--json").stdout)
    assert counters["requests"] == 3 and counters["bytes"]["disk"]["used"] > 0
    told = bough("cache", "stats", "--url", server + "/").stdout
    assert "bytes: device" in told and "cached tokens" in told and " of " in told
    for asked in (["a very old bear"], ["a very old bear", "--raw", "--model", hybrid_folder]):
        told = bough("cache", "explain", *asked, "--salt", "mine", "--url", server)
        assert told.stdout.splitlines() == engine.cache.explain("a very old bear", "mine").lines(), told.stderr
    told = bough("cache", "explain", "--tokens", "1 2", "--url", server, "--json")
    assert json.loads(told.stdout)["matched"] == engine.cache.explain([1, 2]).matched


@pytest.mark.parametrize(
    ("path", "command", "said"),
    [("/x", "tree", "404"), ("/text", "tree", "JSON"), ("/odd", "stats", "version"), ("/foreign", "tree", "version")],
)
def test_a_server_of_another_kind(server, path, command, said):
    done = bough("cache", command, "--url", server + path)
    assert done.exit_code == 1 and said in done.stderr and "\x1b" not in done.stderr and "Traceback" not in done.stderr
