"""The command line, as a shell sees it: what goes to stdout, what to stderr, and the exit code."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bough import CacheConfig, Engine, SamplingParams, __version__
from bough.cli import OPENING, app

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32"]


def bough(*arguments, stdin: str | bytes = "") -> Result:
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
    assert "tokens read" in done.stderr and " written, " in done.stderr
    assert "(0 matched, 0 cached)" in done.stderr


def test_several_prompts(llama_folder, expected):
    done = bough("run", llama_folder, "the fox", "old bear", "--raw", *GREEDY)
    assert done.stdout == "".join(text + "\n" for text in expected["raw"].values())
    assert "2 of 2" in done.stderr


def test_a_disk_cache_serves_the_next_run(hybrid_folder, tmp_path):
    asked = ["run", hybrid_folder, "the fox", "--raw", "--stats", *GREEDY]
    first = bough(*asked, "--disk-cache", tmp_path)
    again = bough(*asked, "--disk-cache", tmp_path)
    assert again.stdout == first.stdout and first.exit_code == 0, first.stderr
    count = int(first.stderr.split()[0])
    assert "(0 matched, 0 cached)" in first.stderr
    assert f"({count} matched, {count - 1} cached)" in again.stderr
    without = bough(*asked, "--no-cache")
    assert without.stdout == first.stdout and "(0 matched, 0 cached)" in without.stderr


def test_a_disk_cache_in_use_is_done_without(llama_folder, tmp_path, expected):
    with Engine.load(llama_folder, dtype="float32", cache=CacheConfig(disk_path=tmp_path)):
        done = bough("run", llama_folder, "the fox", "--raw", *GREEDY, "--disk-cache", tmp_path, "--host-bytes", "1M")
    assert (done.exit_code, done.stdout) == (0, expected["raw"]["the fox"] + "\n")
    assert done.stderr.startswith("warning: ") and done.stderr.count("\n") == 1
    assert "in use by another process" in done.stderr and "without a disk cache" in done.stderr


def test_chat_at_a_terminal_resumes(hybrid_folder):
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "bough", "run", str(hybrid_folder), "--stats", *GREEDY]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.write(ours, b"the quick fox\nand the dog\n\x04")
    _, errors = process.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    first, second = [line for line in errors.splitlines() if "tokens read" in line]
    assert "(0 matched, 0 cached)" in first
    read, matched, cached = (int(each) for each in re.findall(r"(\d+) (?:tokens read|matched|cached)", second))
    assert read > matched >= cached > int(re.findall(r"(\d+) tokens read", first)[0])
    assert process.returncode == 0 and "Traceback" not in errors


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
        (["run", "/nowhere", "x"], "bundled"),
        (["run", "~nobody-of-this-name/x", "x"], "~nobody-of-this-name/x is not there"),
        (["run", "/nowhere", "x", "--temperature", "-1"], "temperature"),  # before anything is looked for
        (["run", "{model}"], "standard input is empty"),
        (["run", "{model}", "x", "--cache-bytes", "7000000T"], "device_bytes"),
        (["run", "{model}", "x", "--cache-bytes", "7000T"], "cannot be had"),
        (["run", "{model}", "", "--raw"], "empty"),
        (["run", "{model}", "the " * 600, "--raw"], "shorten"),
        (["run", "{model}", "x", "--temperature", "-1"], "temperature"),
        (["run", "{model}", "x", "--cache-bytes", "many"], "500M"),
        (["run", "{model}", "x", "--cache-bytes", "1K"], "device_bytes"),
        (["run", "{model}", "x", "--device", "abacus"], "abacus"),
        (["run", "{model}", "x", "--raw", "--system", "y"], "--system"),
        (["run", "{model}", "x", "--host-bytes", "lots"], "500M"),
        (["run", "{model}", "x", "--host-bytes", "-1"], "host_bytes"),
        (["run", "{model}", "x", "--no-cache", "--disk-cache", "y"], "--no-cache"),
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


def writing(folder: Path) -> subprocess.Popen[str]:
    """A process that says when it has begun, and then has 480 tokens to write."""
    start = "import sys, bough.__main__ as it; sys.stdout.write('.'); sys.stdout.flush(); it.main()"
    arguments = ["run", str(folder), "the", "--raw", "--max-tokens", "480", "--temperature", "5"]
    process = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.read(1) == "."
    return process


@pytest.mark.parametrize("signals", [1, 2, 5])
@pytest.mark.parametrize("after", [0.05, 0.3, 1.0, None], ids=str)  # seconds; None: once it has written something
def test_interrupt_stops_cleanly(llama_folder, after, signals):
    process = writing(llama_folder)
    if after is None:
        assert process.stdout is not None
        process.stdout.read(1)
    else:
        time.sleep(after)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, errors = process.communicate(timeout=60)
    assert errors == ""
    assert process.returncode in (0, 130)  # 0: it had ended before the signal came


def test_the_model_in_the_box():
    params = ["--temperature", "0", "--max-tokens", "4"]
    named = bough("run", "bundled", "The old king", *params)
    assert named.exit_code == 0 and named.stdout.strip(), named.stderr
    assert bough("run", *params, stdin="The old king").stdout == named.stdout
    for nothing in ("", "\n"):
        story = bough("run", *params, stdin=nothing)
        assert story.stdout.startswith(OPENING) and "4 written" in story.stderr


def test_input_that_is_not_text(llama_folder):
    done = bough("run", llama_folder, stdin=b"the \xff\xfe fox")
    assert done.exit_code == 1 and done.stderr.startswith("error: ") and "UTF-8" in done.stderr and "4" in done.stderr


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("<&-", "standard input is empty"),
        ("0> /dev/null", "standard input cannot be read"),
        ("x >&-", "output is closed"),
    ],
)
def test_closed_and_odd_streams(llama_folder, redirection, said):
    command = f"{sys.executable} -m bough run {llama_folder} {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(llama_folder):
    command = f"{sys.executable} -m bough run {llama_folder} x --raw > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "space" in done.stderr and done.stderr.count("\n") == 1


def damaged(folder: Path, target: Path, how: str) -> Path:
    """A copy of a model folder, with something wrong."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config, weights = target / "config.json", target / "model.safetensors"
    if how == "architecture":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "abacus"}))
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "nan":
        tensors = load_file(weights)
        tensors["model.norm.weight"].fill_(math.nan)
        save_file(tensors, weights, {"format": "pt"})
    elif how == "no tokenizer":
        (target / "tokenizer.json").unlink()
    return target


@pytest.mark.parametrize(
    ("how", "prompt", "said"),
    [
        ("architecture", "the", "'abacus'; Bough runs"),
        ("truncated", "the", "model.safetensors"),
        ("nan", "the", "not finite"),
        ("no tokenizer", "5 300", "token 300 is not in the vocabulary"),
    ],
)
def test_damaged_models(llama_folder, tmp_path, how, prompt, said):
    done = bough("run", damaged(llama_folder, tmp_path, how), prompt)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ") and said in done.stderr and "Traceback" not in done.stderr
