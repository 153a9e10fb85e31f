"""Every code block of README and docs runs, in the order of its page; NOT_HERE names the commands that cannot.

python              runs, with the blocks before it on its page
yaml                a whole job: its model and data are prepared
yaml fragment       sections of a job: parsed with the others' defaults
yaml not-a-job      another program's YAML
console             each line is typed in the page's shell (see shell.py)
file=NAME           the block is also written to that file, for the blocks behind it; a job with less work
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from code_blocks import FENCE, ROOT, Block, blocks, commands, name_of, pages
from rehearsal import Sandbox
from shell import Shell

from idletrain.cli.main import app
from idletrain.job_file import parse_job
from idletrain.nn.prepare import from_settings

PAGES = pages()
WITH_BLOCKS = [page for page in PAGES if blocks(page)]
BASE = {"name": "fragment", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}
LANGUAGES = {"python", "yaml", "console", "text", "toml"}
TREE = typer.main.get_command(app)
# Beginnings of command lines that are read and not run, and why. Their own program reads them, where it is here.
NOT_HERE = {
    "pip install": "packages come from an index",
    "make": "it installs packages from an index, and runs this test",
    "docker": "its daemon, the base image and a registry are elsewhere",
    "python -m benchmarks": "they take hours, and write into the repository",
    "python workflows/build_centre_word.py": "it reads two Debian packages, of which one is large",
    "python workflows/build_headword.py": "it reads two Debian packages, of which one is large",
    "idletrain launch workflows/centre-word.yaml": "it trains for an hour on the data set of the line before",
    "idletrain launch workflows/headword.yaml": "it trains for minutes on the data set of the line before",
    "idletrain worker tls://head.example.org:8786 --when-idle": "it begins when others leave the machine alone",
    "dask scheduler --host tls://": "it listens beyond this machine; tests/cli/test_machine_certificates.py does it",
    "idletrain launch JOB --scheduler tls://": "the same",
    "export": "it is for the commands after it",
    "idletrain fabric": "it measures for a minute, and with `full` for hours; tests/cli/test_fabric.py does it",
    "python train.py": "it trains for minutes; with --tiny it runs",
}


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


@pytest.fixture
def shell(folder: Path, cloud: Sandbox, account: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """The shell of a page, whose AWS account is a rehearsal cloud."""
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))  # other pages have runs of these names
    opened = Shell(folder, cloud)
    yield opened
    opened.kill()
    for role in account.client("iam").list_roles(PathPrefix="/aws-service-role/")["Roles"]:
        account.client("iam").delete_role(RoleName=role["RoleName"])


def runs_here(line: str) -> bool:
    return not any(line.startswith(words) for words in NOT_HERE) or "--compare" in line or "--tiny" in line


@pytest.mark.filterwarnings("ignore:Tried to parse AWS..S3..BucketPolicy")  # moto makes none
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # torch_geometric
@pytest.mark.timeout(900)  # of a page's commands, on a machine that does much else
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_code_blocks_work(page: Path, folder: Path, request: pytest.FixtureRequest) -> None:
    if page.parent.parent.name == "examples":
        shutil.copytree(page.parent, folder, dirs_exist_ok=True)
    has_shell = any(block.language == "console" for block in blocks(page))
    shell: Shell | None = request.getfixturevalue("shell") if has_shell else None
    if shell and (folder / "job.yaml").exists():
        shell.write_job("job.yaml", yaml.safe_load((folder / "job.yaml").read_text()))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{name_of(page)}: a block of {block.language} is not tested"
        if block.language == "python":
            write_file(block)
            exec(compile(block.text, name_of(page), "exec"), namespace)
        elif block.language == "yaml":
            check_yaml(block)
            write_file(block, shell)
        elif block.language == "console":
            assert shell
            type_lines(block.text, shell)
        elif block.language == "text":
            write_file(block)
    if shell:
        shell.close()


def write_file(block: Block, shell: Shell | None = None) -> None:
    """Write a block to the file that it is; a job, for a shell, with less work."""
    if block.file and shell:
        shell.write_job(block.file, yaml.safe_load(block.text))
    elif block.file:
        Path(block.file).write_text(block.text)


def type_lines(text: str, shell: Shell) -> None:
    for line in commands(text):
        for part in line.split(" | "):
            check_command(part)
        if runs_here(line):
            shell.type(line.partition(" | ")[0])


def check_yaml(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    if "not-a-job" in block.arguments:
        return
    if "fragment" in block.arguments:
        parse_job({**BASE, **tree, "training": tree.get("training", {})})
        return
    job = parse_job(tree)
    if tree["data"].get("train") == "train.txt.gz":
        write_labelled_rows(tree["model"]["args"])
    from_settings(job.model, job.data, job.training, job.memory)


def write_labelled_rows(sizes: dict[str, int]) -> None:
    """Write two small files of the Extreme Classification Repository's form, with a model's features and labels."""
    rows = "".join(f"{row},{sizes['labels'] - 1 - row} {row}:1.0 {row + 100}:0.5\n" for row in range(64))
    text = f"64 {sizes['features']} {sizes['labels']}\n{rows}"
    Path("train.txt.gz").write_bytes(gzip.compress(text.encode()))
    Path("test.txt").write_text(text)


def check_command(line: str) -> None:
    """Refuse what a command does not know: its options, or a program, target or file that is not here."""
    program, *arguments = shlex.split(line)
    if program == "idletrain":
        parse(TREE, arguments, "idletrain")
    elif program == "make":
        subprocess.run(["make", "--dry-run", "--silent", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        extra, constraints = re.fullmatch(r"install -e \.\[(\w+)\] -c (\S+)", " ".join(arguments)).groups()  # type: ignore[union-attr]
        assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert (ROOT / constraints).is_file()
    elif program == "docker" and shutil.which("docker"):
        no_daemon = {**os.environ, "DOCKER_HOST": "unix:///no/daemon"}
        done = subprocess.run(
            ["docker", *arguments], env=no_daemon, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        reached = "non TTY" if arguments[0] == "login" else "daemon"  # its options are right, and so is the folder
        assert reached in done.stderr, f"{line}: {done.stderr}"
    elif program == "python" and not runs_here(line):
        parse_program(arguments)
    elif program == "export":
        assert all(re.fullmatch(r"[A-Z_]+=\S+", argument) for argument in arguments), line
    else:
        assert program in {"aws", "curl", "dask", "docker", "python"}, f"{line}: no test knows {program}"


class ParsedError(Exception):
    """A program has read its arguments."""


def parse_program(arguments: list[str]) -> None:
    """Let a program of the repository read its options, and end it there; without options it only has to exist."""
    is_module = arguments[0] == "-m"
    name, *options = arguments[is_module:]
    places = [place / name for place in (ROOT, *(ROOT / "examples").iterdir())]
    assert importlib.util.find_spec(name) if is_module else any(place.exists() for place in places), name
    read = ArgumentParser.parse_args

    def parse_args(parser: ArgumentParser, argv: list[str] | None = None) -> None:
        read(parser, argv)
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [name, *options])
        for loaded in (name, f"{name}.__main__"):  # by another test; runpy warns of it
            patch.delitem(sys.modules, loaded, raising=False)
        with pytest.raises(ParsedError) if options else contextlib.nullcontext():
            if options and is_module:
                runpy.run_module(name, run_name="__main__")
            elif options:
                runpy.run_path(str(ROOT / name), run_name="__main__")


def parse(command: Any, arguments: list[str], name: str) -> None:
    """Parse as the command line does, without running anything."""
    if commands := getattr(command, "commands", None):
        assert arguments[:1], f"{name} needs a command"
        assert arguments[0] in commands, f"{name} has no command {arguments[0]}"
        parse(commands[arguments[0]], arguments[1:], arguments[0])
    else:
        command.make_context(name, arguments)


def test_markers_that_excuse_a_block_from_running_are_known() -> None:
    known = {"fragment", "not-a-job"}
    for page in WITH_BLOCKS:
        for block in blocks(page):
            assert {word for word in block.arguments if not word.startswith("file=")} <= known, (
                f"{name_of(page)}: {block}"
            )
            ast.parse(block.text) if block.language == "python" else None


def test_every_command_that_is_not_run_is_on_a_page() -> None:
    console = [block.text for page in WITH_BLOCKS for block in blocks(page) if block.language == "console"]
    lines = [line for text in console for line in commands(text)]
    for words in NOT_HERE:
        assert any(line.startswith(words) and not runs_here(line) for line in lines), words


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
    with pytest.raises(AssertionError, match="idletrain has no command start"):
        check_command("idletrain start JOB")
    with pytest.raises(AssertionError, match="no test knows kubectl"):
        check_command("kubectl apply")
    with pytest.raises(subprocess.CalledProcessError):
        check_command("make no-such-target")
    with pytest.raises(SystemExit):
        check_command("python -m benchmarks.modules --no-such-option")
    with pytest.raises(Exception, match="is not a field of a job"):
        check_yaml(Block("yaml", ("fragment",), "training: {step: 3}"))


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
