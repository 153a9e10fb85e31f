"""Every code block of README and docs works: it runs, or it is parsed where its info string says so.

python              runs, with the blocks before it on its page; `parse-only` is compiled
yaml                a whole job: parsed, and its model and data are prepared; `parse-only` is parsed
yaml fragment       sections of a job: parsed with the others' defaults
yaml not-a-job      another program's YAML
console             each `$ idletrain ...` is parsed by the command line; with `run` it runs
file=NAME           the block is also written to that file, for the blocks behind it
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from idletrain.cli.main import app
from idletrain.job_file import parse_job
from idletrain.nn.prepare import from_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("[a-z]*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts and "_generated" not in page.parts]
PAGES += sorted((ROOT / "examples").glob("**/README.md"))
FENCE = re.compile(r"^```(\w[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BASE = {"name": "fragment", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}
LANGUAGES = {"python", "yaml", "console", "text", "toml"}
TREE = typer.main.get_command(app)


class Block(NamedTuple):
    """A code block."""

    language: str
    arguments: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        return next((word.removeprefix("file=") for word in self.arguments if word.startswith("file=")), None)


def blocks(page: Path) -> list[Block]:
    code_blocks = []
    for match in FENCE.finditer(page.read_text()):
        language, *arguments = match[1].split()
        code_blocks.append(Block(language, tuple(arguments), match[2]))
    return code_blocks


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_BLOCKS = [page for page in PAGES if blocks(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page's own directory, on the Python path as `idletrain launch` has it."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_code_blocks_work(page: Path, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{name_of(page)}: a block of {block.language} is not tested"
        if block.file:
            (folder / block.file).write_text(block.text)
        if block.language == "python":
            code = compile(block.text, f"{name_of(page)}", "exec")
            if "parse-only" not in block.arguments:
                exec(code, namespace)
        elif block.language == "yaml":
            check_yaml(block)
        elif block.language == "console":
            for line in commands(block.text):
                check_command(line)
                if "run" in block.arguments:
                    assert not app(shlex.split(line)[1:], standalone_mode=False), line


def commands(text: str) -> Iterator[str]:
    """The lines of a console block that a person types, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        assert line.startswith("$ "), f"{line}: every line of a console block begins with `$ `"
        yield line[2:].split("  # ")[0].strip()


def check_yaml(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    if "not-a-job" in block.arguments:
        return
    if "fragment" in block.arguments:
        parse_job({**BASE, **tree, "training": tree.get("training", {})})
        return
    job = parse_job(tree)
    if "parse-only" not in block.arguments:
        from_settings(job.model, job.data, job.training, job.memory)


def check_command(line: str) -> None:
    """Refuse what a command does not know: its options, or a program, target or file that is not here."""
    program, *arguments = shlex.split(line)
    while "=" in program:  # VARIABLE=value program ...
        program, *arguments = arguments
    if program == "idletrain":
        parse(TREE, arguments, "idletrain")
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(arguments) <= targets, line
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, line
    elif program == "python":
        assert any((place / arguments[0]).exists() for place in (ROOT, *(ROOT / "examples").iterdir())), line


def parse(command: Any, arguments: list[str], name: str) -> None:
    """Parse as the command line does, without running anything."""
    if commands := getattr(command, "commands", None):
        assert arguments[:1], f"{name} needs a command"
        assert arguments[0] in commands, f"{name} has no command {arguments[0]}"
        parse(commands[arguments[0]], arguments[1:], arguments[0])
    else:
        command.make_context(name, arguments)


def test_markers_that_excuse_a_block_from_running_are_known() -> None:
    known = {"parse-only", "fragment", "not-a-job", "run"}
    for page in WITH_BLOCKS:
        for block in blocks(page):
            assert {word for word in block.arguments if not word.startswith("file=")} <= known, (
                f"{name_of(page)}: {block}"
            )
            ast.parse(block.text) if block.language == "python" else None


def test_generated_reference_names_the_values_of_a_switch() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    fields = generate.job_fields()  # an error names a field of a kind that it has no words for
    assert re.search(r"nesterov` \| `true` or `false` \| `false` \| \w", fields)
    assert generate.metrics()
    assert generate.events()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_wrong_options_and_jobs_are_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command("idletrain launch JOB --no-such-option")
    with pytest.raises(AssertionError):
        check_command("idletrain start JOB")
    with pytest.raises(Exception, match="is not a field of a job"):
        check_yaml(Block("yaml", ("fragment",), "training: {step: 3}"))


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
