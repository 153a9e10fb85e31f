"""Replace `shutdown`, `install` and `docker` on a rehearsed machine. A program of its own, stdlib only:

python -I -S shims.py shutdown -h +5|now
python -I -S shims.py install DIRECTORY -D /dev/stdin /FILE
python -I -S shims.py docker DIRECTORY BYTES run [OPTIONS] IMAGE ARGS...
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

FLAGS = frozenset({"--rm", "--init", "--read-only", "-i", "--interactive", "-t", "--tty"})
VALUED = frozenset(
    {
        "--cap-drop", "--cpus", "-e", "--env", "--gpus", "--hostname", "-h", "--ipc", "--log-driver", "--log-opt",
        "-m", "--memory", "--name", "--net", "--network", "--pid", "--pull", "--security-opt", "--shm-size",
        "--stop-timeout", "--tmpfs", "--ulimit", "-u", "--user", "-v", "--volume",
    }
)  # fmt: skip
# A container sees no variables of the host but those passed to it; these belong to the machine itself.
HOST_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "PYTHONPATH",
    "AWS_ENDPOINT_URL",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
)


DOOR = "containers"  # the supervisor's socket in the machine's directory, at which `docker` asks for one
SIGNALLED = 128  # plus a signal's number is the status of what it ended, to a shell


class UsageError(Exception):
    """Arguments that the real command, or this replacement, does not support."""


@dataclass(frozen=True)
class Container:
    """The environment, image and arguments of a `docker run`."""

    environment: Mapping[str, str]
    image: str
    arguments: tuple[str, ...]


def shutdown_seconds(arguments: Sequence[str]) -> float:
    """Return the seconds until the requested shutdown.

    Raises:
        UsageError: it is not `-h now` or `-h +MINUTES`.
    """
    match arguments:
        case ["-h" | "-P", "now" | "+0"]:
            return 0.0
        case ["-h" | "-P", at] if re.fullmatch(r"\+[0-9]{1,9}", at):
            return 60.0 * int(at)
    raise UsageError(f"shutdown: {' '.join(arguments)}: this rehearsal knows `-h now` and `-h +MINUTES`")


def installed(directory: Path, arguments: Sequence[str]) -> Path:
    """Return where a file is installed: below the machine's own directory, which represents its disk.

    Raises:
        UsageError: the arguments are not `-D /dev/stdin /FILE`, or the path leads out of the directory.
    """
    match arguments:
        case ["-D", "/dev/stdin", file] if file.startswith("/") and ".." not in Path(file).parts:
            return directory / file.lstrip("/")
    raise UsageError(f"install: {' '.join(arguments)}: this rehearsal knows `-D /dev/stdin /FILE`")


def container(arguments: Sequence[str], host: Mapping[str, str]) -> Container:
    """Parse the arguments of `docker`.

    Args:
        arguments: The arguments.
        host: The machine's environment.

    Raises:
        UsageError: the command is not `run`, an option is unknown, or there is no image.
    """
    if not arguments or arguments[0] != "run":
        raise UsageError(f"docker: {' '.join(arguments)}: this rehearsal knows `run`")
    environment = {key: host[key] for key in HOST_VARIABLES if key in host}
    rest = list(arguments[1:])
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in FLAGS and not equals:
            continue
        if option not in VALUED:
            raise UsageError(f"docker: unknown flag: {option}")
        if not equals:
            if not rest:
                raise UsageError(f"docker: flag needs an argument: {option}")
            value = rest.pop(0)
        if option in ("-e", "--env"):
            key, has_value, text = value.partition("=")
            if has_value or key in host:
                environment[key] = text if has_value else host[key]
    if not rest:
        raise UsageError("docker: 'docker run' requires at least 1 argument")
    return Container(environment, rest[0], tuple(rest[1:]))


def _shutdown(*arguments: str) -> int:
    seconds = shutdown_seconds(arguments)
    # From the environment: arguments can be read by every user of this computer.
    metadata = urlsplit(os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"])
    connection = http.client.HTTPConnection(metadata.netloc, timeout=30)
    connection.request("POST", f"{metadata.path}/shutdown", str(seconds))
    return 0 if connection.getresponse().status == http.client.OK else 1


def _install(directory: str, *arguments: str) -> int:
    file = installed(Path(directory), arguments)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(sys.stdin.read())
    file.chmod(0o755)
    return 0


def _docker(directory: str, memory_bytes: str, *arguments: str) -> int:
    run = container(arguments, os.environ)
    command = [*run.arguments, "--memory", memory_bytes, "--slots", "1"]
    request = {"module": "idletrain", "arguments": command, "environment": dict(run.environment)}
    content = json.dumps(request).encode() + b"\n"
    os.chdir(directory)  # a socket's path has at most 107 letters
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.connect(DOOR)
        supervisor.sendall(content[socket.send_fds(supervisor, [content], (0, 1, 2)) :])
        status = int(supervisor.recv(16) or -9)  # -9: killed with its machine
    return status if status >= 0 else SIGNALLED - status


COMMANDS: Mapping[str, Callable[..., int]] = {"shutdown": _shutdown, "install": _install, "docker": _docker}

if __name__ == "__main__":
    try:
        sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(125)  # docker's own
