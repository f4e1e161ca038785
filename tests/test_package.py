"""The package as a whole: what importing it needs, what it declares, and that the README and CI say the same."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = {"torch", "numpy", "safetensors", "tokenizers", "jinja2"}
PINNED = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")

# Runs in a process of its own, which can find the standard library, bough and the modules named on the command line.
IMPORT_BOUGH = """
import sys
from importlib.machinery import PathFinder

allowed = {*sys.stdlib_module_names, "bough", *sys.argv[1:]}
finders = list(sys.meta_path)


class OnlyAllowed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            return None  # not found, as if it were not installed
        return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)


sys.meta_path[:] = [OnlyAllowed]

try:
    import hypothesis
except ModuleNotFoundError:
    pass
else:
    sys.exit("hypothesis could be imported: nothing is being hidden")

import bough

for name in ("Engine", "SamplingParams", "CacheConfig", *bough.__all__):
    getattr(bough, name)
"""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(requirement: str) -> str:
    """The name in a requirement: `Foo_Bar[x]>=1; marker` is `foo-bar`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement).group()
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(*names: str) -> set[str]:
    """These distributions and all that they require, extras aside, as far as it is installed."""
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # required on another platform
        if name not in found:
            found.add(name)
            todo += [canonical(each) for each in requirements if "extra ==" not in each]
    return found


def importable(distributions: set[str]) -> set[str]:
    """The top-level modules that these distributions bring."""
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if any(canonical(owner) in distributions for owner in owners)
    }


def readme_commands() -> list[str]:
    """The commands of the README's shell blocks, in order, without prompts and comments."""
    blocks = re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ").partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_import_needs_only_the_five_dependencies():
    # tokenizers requires huggingface_hub, but only downloads with it; torch may bring triton. Bough needs neither.
    distributions = with_dependencies(*NEEDED - {"tokenizers"}) | {"tokenizers"}
    allowed = importable(distributions) - {"triton"}
    assert allowed >= NEEDED

    command = [sys.executable, "-c", IMPORT_BOUGH, *sorted(allowed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_declared_dependencies_are_those_five():
    assert {canonical(each) for each in project()["dependencies"]} == NEEDED


def test_every_declared_dependency_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not PINNED.fullmatch(line)] == []

    groups = [project()["dependencies"], *project()["optional-dependencies"].values()]
    declared = {canonical(requirement) for group in groups for requirement in group}
    assert declared <= {canonical(line) for line in lines}


def test_readme_opens_with_run_and_test():
    assert readme_commands()[:2] == ["make run", "make test"]


def test_ci_runs_the_checks_and_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    made = [line for line in script if line.startswith("make ")]
    assert made == ["make check", readme_commands()[1]]


def test_all_that_is_not_python_is_packaged():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["bough"]
    files = {path for path in (ROOT / "bough").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    packaged = {path for pattern in listed for path in (ROOT / "bough").glob(pattern)}
    assert {path for path in files if path.suffix != ".py"} == packaged
