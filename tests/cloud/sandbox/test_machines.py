"""A machine is a private place with shims first on its path; it ends when it is told to or when its program does."""

from __future__ import annotations

import json
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import eventually

from idletrain.cloud.aws import user_data
from idletrain.cloud.sandbox.machines import MachineProcesses, warm_up
from idletrain.cloud.sandbox.metadata import Facts
from idletrain.cluster.forked_processes import WarmParent

GIB = 1 << 30
MOST_FILE_BYTES = 1 << 16
SHUTDOWNS: list[float] = []


def facts() -> Facts:
    return Facts(instance="i-1", type="t", address="127.1.2.3", region="r", zone="ra", tags=None)


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent]:
    """What starts the machines of all tests here."""
    warm = warm_up()
    yield warm
    warm.close()


@pytest.fixture
def machines(tmp_path: Path, parent: WarmParent) -> Iterator[MachineProcesses]:
    processes = MachineProcesses("http://127.0.0.1:9", GIB, tmp_path, {}, parent)
    yield processes
    processes.close()
    assert processes.processes() == []


def output(machines: MachineProcesses, logs: Path, program: str, instance: str = "i-1") -> str:
    """What a machine says that runs to its end."""
    machines.boot(instance, f"#!/bin/bash\n{program}\n".encode(), facts, SHUTDOWNS.append)
    eventually(lambda: machines.ended() == {instance})
    return (logs / f"{instance}.log").read_text()


def test_a_machine_sees_its_own_place_and_none_of_our_secrets(
    machines: MachineProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ours")
    monkeypatch.setenv("PIP_INDEX_URL", "ours")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    written = output(
        machines, tmp_path, 'env; stat -c "mode=%a" .; echo "home=$HOME pwd=$PWD"; type -p docker install shutdown'
    )
    seen = dict(line.split("=", 1) for line in written.splitlines() if "=" in line)
    assert not {"AWS_SECRET_ACCESS_KEY", "PIP_INDEX_URL", "AWS_ACCESS_KEY_ID"} & seen.keys()
    assert seen["AWS_ENDPOINT_URL"] == "http://127.0.0.1:9"
    assert seen["AWS_EC2_METADATA_SERVICE_ENDPOINT"].startswith("http://127.0.0.1:")
    assert seen["PYTHONPATH"] == "/ours"
    assert seen["mode"] == "700"
    home_dir = seen["HOME"]
    assert f"home={home_dir} pwd={home_dir}" in written
    assert f"{home_dir}/bin/docker\n{home_dir}/bin/install\n{home_dir}/bin/shutdown\n" in written
    assert not Path(home_dir).exists()


def test_what_user_data_keep_for_later_boots_stays_on_the_machine_and_off_the_host(
    machines: MachineProcesses, tmp_path: Path
) -> None:
    host = Path(user_data.PER_BOOT)
    before = sorted(host.parent.iterdir()) if host.parent.exists() else None
    text = user_data.user_data(4e9, "image").removeprefix("#!/bin/bash\n")
    written = output(machines, tmp_path, f"docker() {{ cat $HOME{user_data.PER_BOOT}; }}\n{text}")
    assert "shutdown -h +$(( left = (4000000000 - $(date +%s))" in written
    assert (sorted(host.parent.iterdir()) if host.parent.exists() else None) == before
    outside = set(re.findall(r"\s(/\S+)", text)) - {"/", user_data.PER_BOOT}
    assert outside == {"/dev/stdin"}  # the folder is named to `install` alone, whose stand-in is first on the path


def test_a_machine_is_killed_with_all_that_it_started(machines: MachineProcesses, tmp_path: Path) -> None:
    machines.boot("i-1", b"#!/bin/bash\nsetsid sleep 300 & sleep 301\n", facts, SHUTDOWNS.append)
    machines.boot("i-2", b"#!/bin/bash\nsleep 302\n", facts, SHUTDOWNS.append)
    eventually(lambda: sorted(len(p["pids"]) for p in machines.processes()) == [2, 3])
    machines.keep_only({"i-2"})
    assert machines.running() == {"i-2"}
    eventually(lambda: [p["instance"] for p in machines.processes()] == ["i-2"])


def test_an_instance_without_a_program_just_runs(machines: MachineProcesses) -> None:
    machines.boot("i-1", b"", facts, SHUTDOWNS.append)
    eventually(lambda: [len(p["pids"]) for p in machines.processes()] == [1])
    assert machines.ended() == frozenset()


def test_the_container_gets_the_machines_size_and_only_its_own_variables(
    machines: MachineProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "idletrain"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    program = "export SECRET=1\ndocker run --rm --network host --env A=1 image node --verbose"
    arguments, environment = json.loads(output(machines, tmp_path, program))
    assert arguments == ["node", "--verbose", "--memory", str(GIB), "--slots", "1"]
    assert environment["A"] == "1"
    assert environment["AWS_ENDPOINT_URL"] == "http://127.0.0.1:9"
    assert "SECRET" not in environment


def test_a_program_that_docker_would_refuse_says_so_in_the_log(machines: MachineProcesses, tmp_path: Path) -> None:
    assert "unknown flag: --what" in output(machines, tmp_path, "docker run --what image node")


def test_a_program_learns_how_its_container_ended(machines: MachineProcesses, tmp_path: Path) -> None:
    program = "docker run image no-such-command; echo status=$?"
    written = output(machines, tmp_path, program)
    assert "No such command" in written
    assert "status=2\n" in written


def test_a_container_that_is_killed_ends_as_dockers_would(machines: MachineProcesses, tmp_path: Path) -> None:
    killed = "until pkill -KILL -P $PPID idletrain-node; do sleep 0.01; done"
    program = f"docker run image node & {killed}; wait $!; echo status=$?"
    assert "status=137\n" in output(machines, tmp_path, program)


def test_a_machine_that_cannot_be_written_leaves_nothing(
    machines: MachineProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "machines"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            machines.boot("i-1", bytes(2 * MOST_FILE_BYTES), facts, SHUTDOWNS.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(place.iterdir()) == []
    assert machines.running() == frozenset()
