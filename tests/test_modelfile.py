"""Modelfiles as people write them, and what they are told of their mistakes."""

from pathlib import Path

import pytest

from bough.errors import OptionError
from bough.store.modelfile import IDLE, parse_modelfile, read_modelfile


def parse(text: str):
    return parse_modelfile(text, Path("/models"))


def test_everything_at_once():
    read = parse(
        "# a comment\n\n"
        "FROM ./base\n"
        "  draft ./small   \n"
        "Parameter temperature 0.3\n"
        "PARAMETER\ttop_k\t40\n"
        'PARAMETER stop "<|im_end|>"\n'
        'parameter stop "User: "\n'
        "PARAMETER num_ctx 4096\n"
        'SYSTEM """You are "Bob".\n# no comment\n\n  indented """\n'
        "TEMPLATE {% for m in messages %}{{ m.content }}{% endfor %}\n"
        "LICENSE MIT\n"
        'LICENSE """\nmore\n"""\n'
    )
    assert (read.source, read.draft) == ("./base", "./small")
    assert read.parameters == {"temperature": 0.3, "top_k": 40, "stop": ["<|im_end|>", "User: "], "num_ctx": 4096}
    assert read.system == 'You are "Bob".\n# no comment\n\n  indented '
    assert read.template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert read.license == ("MIT", "\nmore\n")
    assert (read.folder, read.notes) == (Path("/models"), ())
    assert read.lines["SYSTEM"] == 10 and read.at("DRAFT") == "line 4: DRAFT "


def test_carriage_returns_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "Modelfile"
    file.write_bytes('\ufeffFROM x\r\nSYSTEM """a\r\nb"""\r\nPARAMETER seed 3\r\n'.encode())
    read = read_modelfile(file)
    assert (read.source, read.system, read.parameters, read.folder) == ("x", "a\nb", {"seed": 3}, tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("SYSTEM be brief", "be brief"),
        ('SYSTEM "be brief"', "be brief"),
        ('SYSTEM "say "hi" often"', 'say "hi" often'),
        ("SYSTEM it's # no comment", "it's # no comment"),
        ('SYSTEM """"quoted" words"""', '"quoted" words'),
        ('SYSTEM """\n"""', "\n"),
        ('SYSTEM """ends with spaces  \n"""', "ends with spaces  \n"),
        ('SYSTEM ""', ""),
        ("SYSTEM", ""),
    ],
)
def test_values(text, value):
    assert parse(f"FROM x\n{text}").system == value


def test_the_last_of_a_parameter_counts_and_idle_ones_are_told():
    read = parse("FROM x\nPARAMETER temperature 1\nPARAMETER temperature 0\nPARAMETER num_gpu 1")
    assert read.parameters == {"temperature": 0.0}
    assert read.notes == ("line 4: num_gpu has no effect here",) and "num_gpu" in IDLE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no FROM"),
        ("SYSTEM hi", "has no FROM"),
        ("FROM a\n\nFROM b", "line 3: FROM was given on line 1 already"),
        ("FROM", "line 1: FROM needs a value"),
        ('FROM ""', "line 1: FROM needs a value"),
        ("# x\nFROM a\nWHAT b", r"line 3: 'WHAT' is no keyword; there are FROM, DRAFT"),
        ("FROM a\nADAPTER b", "line 2: ADAPTER is not supported: .* merge it into the weights"),
        ("FROM a\nMESSAGE user hi", "line 2: MESSAGE is not supported: .*SYSTEM"),
        ('FROM a\nSYSTEM "hi', "line 2: the quote is not closed"),
        ('FROM a\nSYSTEM "hi" there', "line 2: there is 'there' after the closing quote"),
        ('FROM a\nSYSTEM """hi\nFROM b\n', 'line 2: the text begins with """ and does not end'),
        ('FROM a\nSYSTEM """hi\n""" x', "line 3: there is 'x' after the closing"),
        ("FROM a\nPARAMETER", "line 2: PARAMETER needs a name and a value"),
        ("FROM a\nPARAMETER temperature", "line 2: PARAMETER needs a name and a value"),
        ("FROM a\nPARAMETER temperature hot", "line 2: temperature is 'hot'; it must be a number"),
        ("FROM a\nPARAMETER temperature -1", "line 2: temperature is -1.0; it must be a number, 0 or more"),
        ("FROM a\nPARAMETER temperature nan", "line 2: temperature is nan"),
        ("FROM a\nPARAMETER top_p 1.5", "line 2: top_p is 1.5"),
        ("FROM a\nPARAMETER top_k 1.5", "line 2: top_k is '1.5'; it must be a whole number"),
        ("FROM a\nPARAMETER repeat_penalty 0", "line 2: repetition_penalty is 0.0"),
        ("FROM a\nPARAMETER num_ctx 0", "line 2: num_ctx is 0"),
        ('FROM a\nPARAMETER stop ""', "line 2: PARAMETER needs"),
        ("FROM a\nPARAMETER warmth 1", "line 2: there is no parameter 'warmth'; there are .*temperature"),
        ("FROM a\nTEMPLATE {{ .Prompt }}", "line 2: this is a template of Go.*Bough's are Jinja.*messages"),
        ("FROM a\nTEMPLATE {{- if .System }}x{{ end }}", "line 2: this is a template of Go"),
        ("FROM a\nTEMPLATE {{ range $i, $_ := .Messages }}{{ end }}", "line 2: this is a template of Go"),
    ],
)
def test_mistakes_are_told_with_their_line(text, told):
    with pytest.raises(OptionError, match=told):
        parse(text)


def test_jinja_is_not_taken_for_go():
    for template in ("{{ messages }}", "{{- bos_token }}", "{{ endings }}", "{{ iffy.x }}", "{% if x %}{% endif %}"):
        assert parse(f"FROM a\nTEMPLATE {template}").template == template


def test_files_that_are_no_modelfiles(tmp_path):
    with pytest.raises(OptionError, match=r"cannot be read .*; name the Modelfile with -f"):
        read_modelfile(tmp_path / "Modelfile")
    (tmp_path / "Modelfile").write_bytes("FROM a".encode("utf-16"))
    with pytest.raises(OptionError, match="not UTF-8 text"):
        read_modelfile(tmp_path / "Modelfile")
    with (tmp_path / "Modelfile").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(OptionError, match="is it a Modelfile"):
        read_modelfile(tmp_path / "Modelfile")
