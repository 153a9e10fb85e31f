"""`shutdown`, `install` and `docker` understand what the user data say, and refuse what they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from idletrain.cloud.sandbox import shims
from idletrain.cloud.sandbox.shims import Container, UsageError, container, installed, shutdown_seconds

HOST = {"PATH": "/bin", "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "EXPORTED": "by the user data"}
SEEN = {"PATH": "/bin", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}


@pytest.mark.parametrize(("arguments", "seconds"), [(["-h", "now"], 0), (["-h", "+0"], 0), (["-P", "+5"], 300)])
def test_a_shutdown_is_armed_for_its_time(arguments: list[str], seconds: float) -> None:
    assert shutdown_seconds(arguments) == seconds


@pytest.mark.parametrize("arguments", [[], ["now"], ["-h"], ["-h", "5"], ["-h", "+x"], ["-r", "now"], ["-h", "23:00"]])
def test_another_shutdown_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="shutdown"):
        shutdown_seconds(arguments)


def test_a_file_is_installed_below_the_machine_s_directory_and_nowhere_else(tmp_path: Path) -> None:
    assert installed(tmp_path, ["-D", "/dev/stdin", "/var/lib/x"]) == tmp_path / "var/lib/x"
    for arguments in (
        ["-D", "/dev/stdin", "/../x"],
        ["-D", "/dev/stdin", "x"],
        ["/dev/stdin", "/x"],
        ["-D", "a", "/x"],
        [],
    ):
        with pytest.raises(UsageError, match="install: "):
            installed(tmp_path, arguments)


def test_options_are_taken_off_and_the_rest_is_the_image_and_its_words() -> None:
    arguments = ["run", "--rm", "--network", "host", "-v", "/a:/b", "--name=n", "-i", "image:1", "node", "--rm", "-x"]
    assert container(arguments, HOST) == Container(SEEN, "image:1", ("node", "--rm", "-x"))


def test_a_container_sees_only_what_it_is_given() -> None:
    arguments = ["run", "--env", "A=1=2", "--env=B=", "-e", "EXPORTED", "-e", "MISSING", "image"]
    assert container(arguments, HOST).environment == {**SEEN, "A": "1=2", "B": "", "EXPORTED": "by the user data"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "knows `run`"),
        (["pull", "image"], "knows `run`"),
        (["run"], "at least 1 argument"),
        (["run", "--rm"], "at least 1 argument"),
        (["run", "--detach", "image"], "unknown flag: --detach"),
        (["run", "--rm=maybe", "image"], "unknown flag: --rm"),
        (["run", "--env"], "needs an argument: --env"),
    ],
)
def test_words_that_docker_or_this_does_not_know_are_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        container(arguments, HOST)


def test_a_refusal_ends_as_dockers_would() -> None:
    command = [sys.executable, "-I", "-S", shims.__file__, "docker", "/", "1", "run", "--what", "image"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (125, "docker: unknown flag: --what\n")
