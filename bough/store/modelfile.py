"""Modelfiles, as Ollama's users write them: what a model is made of, and how it is to be used.

    # a comment
    FROM ./folder                     a folder, a .gguf file, a stored model, or a repository of the hub
    DRAFT ./assistant                 who guesses tokens ahead for it: a folder, a file, or a stored model
    TEMPLATE \"\"\"{% for m in messages %}...\"\"\"
    SYSTEM "be brief"
    PARAMETER temperature 0.3
    LICENSE Apache-2.0

Keywords may be written in any case. A value is the rest of its line, or what is between quotes; between three of them
it may go over lines. Every mistake is told with its line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from bough.engine.about import CONTEXT, SAMPLING, About
from bough.errors import OptionError, RequestError

KEYWORDS = ("FROM", "DRAFT", "TEMPLATE", "SYSTEM", "PARAMETER", "LICENSE")
REFUSED = {
    "ADAPTER": "Bough does not load adapters; merge it into the weights first, and name the merged folder with FROM",
    "MESSAGE": "examples of a chat are not stored; put them into SYSTEM",
}
WHOLE = {"top_k", "seed", "num_predict", CONTEXT}
# What Ollama knows and what has no meaning here: how it loads models, and ways to sample that we do not have.
IDLE = (
    "repeat_last_n", "mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p", "num_keep", "num_gpu",
    "num_thread", "num_batch", "main_gpu", "numa", "low_vram", "use_mmap", "use_mlock", "f16_kv", "vocab_only",
    "penalize_newline", "num_gqa", "logits_all", "embedding_only", "rope_frequency_base", "rope_frequency_scale",
)  # fmt: skip
GO = re.compile(r"\{\{-?\s*(\.|\$|(if|else|end|range|with|template|define|block|and|or|not|eq|len)\b)")
QUOTES = '"""'
BIGGEST = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Modelfile:
    """What a Modelfile says. What it does not say is None."""

    source: str
    draft: str | None = None
    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    license: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was read and has no effect
    folder: Path = Path()  # which paths in it begin from
    lines: Mapping[str, int] = field(default_factory=dict)  # where each keyword stands

    def at(self, keyword: str) -> str:
        """Where in the file a keyword is, for messages; nothing if there is no file."""
        return f"line {self.lines[keyword]}: {keyword} " if keyword in self.lines else f"{keyword} "


def read_modelfile(path: Path) -> Modelfile:
    try:
        data = path.read_bytes() if path.stat().st_size <= BIGGEST else None
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); name the Modelfile with -f") from None
    if data is None:
        raise OptionError(f"{path} is larger than {BIGGEST >> 20} MiB; is it a Modelfile?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text (see byte {error.start}); convert it first") from None
    return parse_modelfile(text, path.absolute().parent, str(path))


def parse_modelfile(text: str, folder: Path, where: str = "Modelfile") -> Modelfile:
    """The Modelfile that a text is."""
    reader = _Reader(text.replace("\r\n", "\n").split("\n"), where)
    given: dict[str, Any] = {"parameters": {}, "license": (), "notes": ()}
    lines: dict[str, int] = {}
    while (found := reader.next()) is not None:
        line, keyword, name, value = found
        if keyword == "LICENSE":
            given["license"] += (value,)
        elif keyword == "PARAMETER" and name.lower() in IDLE:
            given["notes"] += (f"line {line}: {name} has no effect here",)
        elif keyword == "PARAMETER":
            _tell(reader, line, _take_parameter, given["parameters"], name.lower(), value)
        elif keyword in lines:
            reader.refuse(line, f"{keyword} was given on line {lines[keyword]} already; leave one of them")
        elif not value.strip() and keyword != "SYSTEM":
            reader.refuse(line, f"{keyword} needs a value")
        else:
            given[{"FROM": "source"}.get(keyword, keyword.lower())] = value
        lines.setdefault(keyword, line)
        if keyword == "TEMPLATE":
            _tell(reader, line, check_template, value)
    if "FROM" not in lines:
        raise OptionError(f"{where} has no FROM; name the model to begin with: FROM ./folder")
    return Modelfile(**given, folder=folder, lines=lines)


def check_template(source: str) -> None:
    """Refuse what is no Jinja, before it is said to be broken."""
    if GO.search(source):
        raise OptionError(
            "this is a template of Go, as Ollama has them; Bough's are Jinja, as in chat_template.jinja of the model:"
            " {% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}. Leave TEMPLATE out to use the"
            " model's own"
        )


def parameter(name: str, text: str) -> Any:
    """The value of a parameter that was written as text."""
    if name == "stop":
        return text
    try:
        return int(text) if name in WHOLE else float(text)
    except ValueError:
        raise OptionError(f"{name} is {text!r}; it must be a {'whole ' if name in WHOLE else ''}number") from None


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse values that could not be sampled with, and names that mean nothing."""
    for name, value in parameters.items():
        if name not in SAMPLING and name != CONTEXT:
            raise OptionError(f"there is no parameter {name!r}; there are {', '.join(sorted([*SAMPLING, CONTEXT]))}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name != "stop" and not number:
            raise OptionError(f"{name} is {value!r}; it must be a number")
        if name in WHOLE and not isinstance(value, int):
            raise OptionError(f"{name} is {value!r}; it must be a whole number")
    About(parameters=parameters)


def _take_parameter(parameters: dict[str, Any], name: str, text: str) -> None:
    if not name or not text:
        raise OptionError("PARAMETER needs a name and a value, e.g. PARAMETER temperature 0.3")
    read = parameter(name, text)
    check_parameters({name: [read] if name == "stop" else read})
    parameters[name] = [*parameters.get(name, ()), read] if name == "stop" else read


def _tell(reader: "_Reader", line: int, check: Callable[..., None], *what: Any) -> None:
    """Whatever a check refuses, with the line."""
    try:
        check(*what)
    except RequestError as error:
        reader.refuse(line, str(error))


class _Reader:
    """The instructions of a file, one after the other."""

    def __init__(self, lines: list[str], where: str) -> None:
        self.lines, self.where, self.at = lines, where, 0

    def refuse(self, line: int, what: str) -> NoReturn:
        raise OptionError(f"{self.where}, line {line}: {what}")

    def next(self) -> tuple[int, str, str, str] | None:
        """(line, keyword, name of a parameter, value), or None at the end."""
        while self.at < len(self.lines):
            text, line = self.lines[self.at].strip(), self.at + 1
            self.at += 1
            if not text or text.startswith("#"):
                continue
            word, value = _split(text)
            keyword = word.upper()
            if keyword in REFUSED:
                self.refuse(line, f"{keyword} is not supported: {REFUSED[keyword]}")
            if keyword not in KEYWORDS:
                self.refuse(line, f"{word!r} is no keyword; there are {', '.join(KEYWORDS)}")
            name, value = _split(value) if keyword == "PARAMETER" else ("", value)
            return line, keyword, name, self._value(line, value)
        return None

    def _value(self, line: int, text: str) -> str:
        if text.startswith(QUOTES):
            return self._multiline(line, text.removeprefix(QUOTES))
        if not text.startswith('"'):
            return text
        inside, closing, after = text[1:].rpartition('"')
        if not closing:
            self.refuse(line, 'the quote is not closed; write """ around a text of several lines')
        if after.strip():
            self.refuse(line, f"there is {after.strip()!r} after the closing quote")
        return inside

    def _multiline(self, line: int, first: str) -> str:
        """Everything up to the next three quotes, as it is."""
        text = [self.lines[line - 1].partition(QUOTES)[2]] if first else [""]  # with the spaces at the end of the line
        while QUOTES not in text[-1]:
            if self.at >= len(self.lines):
                self.refuse(line, 'the text begins with """ and does not end; close it with """')
            text.append(self.lines[self.at])
            self.at += 1
        last, _, after = text[-1].partition(QUOTES)
        if after.strip():
            self.refuse(self.at, f'there is {after.strip()!r} after the closing """')
        return "\n".join([*text[:-1], last])


def _split(text: str) -> tuple[str, str]:
    """The first word, and what comes after it."""
    word, *rest = re.split(r"\s+", text, maxsplit=1)
    return word, rest[0] if rest else ""
