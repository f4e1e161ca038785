"""The command line, as a shell sees it: what goes to stdout, what to stderr, and the exit code."""

import signal
import subprocess
import sys
import time

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bough import Engine, SamplingParams, __version__
from bough.cli import app

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32"]


def bough(*arguments, stdin: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in arguments], input=stdin)


@pytest.fixture(scope="module")
def expected(llama_folder):
    """What the model says to a raw prompt and in a chat."""
    params = SamplingParams(max_tokens=12, temperature=0)
    with Engine.load(llama_folder, dtype="float32") as engine:
        raw = {prompt: engine.generate(prompt, params).text for prompt in ("the fox", "old bear")}
        return {"raw": raw, "chat": engine.chat(system="be brief").send("the fox", params).text}


def test_raw_prompt_goes_to_stdout_alone(llama_folder, expected):
    done = bough("run", llama_folder, "the fox", "--raw", *GREEDY)
    assert (done.exit_code, done.stdout) == (0, expected["raw"]["the fox"] + "\n"), done.stderr
    assert done.stderr == ""


def test_chat_template_is_used(llama_folder, expected):
    done = bough("run", llama_folder, "the fox", "--system", "be brief", *GREEDY)
    assert (done.exit_code, done.stdout) == (0, expected["chat"] + "\n"), done.stderr


def test_prompt_from_stdin_and_stats(llama_folder, expected):
    done = bough("run", llama_folder, "--raw", "--stats", *GREEDY, stdin="the fox")
    assert done.stdout == expected["raw"]["the fox"] + "\n"
    assert "12 written" in done.stderr and "tokens read" in done.stderr


def test_several_prompts(llama_folder, expected):
    done = bough("run", llama_folder, "the fox", "old bear", "--raw", *GREEDY)
    assert done.stdout == "".join(text + "\n" for text in expected["raw"].values())
    assert "2 of 2" in done.stderr


def test_token_prompt_without_tokenizer(llama_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama_folder / name)
    with Engine.load(tmp_path, dtype="float32") as engine:
        tokens = engine.generate([5, 6, 7], SamplingParams(max_tokens=12, temperature=0)).tokens
    done = bough("run", tmp_path, "5 6, 7", *GREEDY)
    assert list(map(int, done.stdout.split())) == tokens
    done = bough("run", tmp_path, "words", *GREEDY)
    assert done.exit_code == 1 and "token ids" in done.stderr


def test_show(hybrid_folder):
    done = bough("show", hybrid_folder, "--cache-bytes", "8M")
    assert done.exit_code == 0, done.stderr
    for fact in (
        "Qwen35",
        "3 gated delta, 1 full attention",
        "512 tokens, vocabulary 300",
        "peak of activations",
        "fit at once",
    ):
        assert fact in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "/nowhere", "x"], "/nowhere"),
        (["run", "{model}", "", "--raw"], "empty"),
        (["run", "{model}", "the " * 600, "--raw"], "shorten"),
        (["run", "{model}", "x", "--temperature", "-1"], "temperature"),
        (["run", "{model}", "x", "--cache-bytes", "many"], "500M"),
        (["run", "{model}", "x", "--cache-bytes", "1K"], "device_bytes"),
        (["run", "{model}", "x", "--device", "abacus"], "abacus"),
        (["run", "{model}", "x", "--raw", "--system", "y"], "--system"),
        (["show", "{model}", "--context", "0"], "context"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(llama_folder, arguments, said):
    done = bough(*(each.format(model=llama_folder) for each in arguments))
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_template_is_an_error(llama_folder, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(llama_folder / name)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    done = bough("run", tmp_path, "x", *GREEDY)
    assert done.exit_code == 1 and "template" in done.stderr and "Traceback" not in done.stderr


def test_usage_errors_and_help():
    assert bough("run", "--what").exit_code == 2
    assert bough("dance").exit_code == 2
    help_text = bough("run", "--help")
    assert help_text.exit_code == 0 and "Example" in help_text.stdout
    assert bough("version").stdout.strip() == __version__


def test_reader_that_leaves_early(llama_folder):
    command = f"{sys.executable} -m bough run {llama_folder} the --raw --max-tokens 400 | head -c 1 | wc -c"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr


def test_interrupt_stops_cleanly(llama_folder):
    command = [
        sys.executable,
        "-m",
        "bough",
        "run",
        str(llama_folder),
        "the",
        "--raw",
        "--max-tokens",
        "480",
        "--temperature",
        "5",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert "Traceback" not in errors
    assert process.returncode in (0, 130)  # 0: it had ended before the signal came
