"""A run in the rehearsal cloud whose machines are noticed, taken and killed; and what is left when its launcher dies.

One run serves several tests: it takes most of a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
import yaml
from distributed.core import rpc
from distributed.security import Security
from rehearsal import Sandbox

from idletrain.cloud import launcher, record
from idletrain.cloud.aws.account import Account
from idletrain.cluster import certificates, fork_server, warm_parent
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.storage import S3Prefix

from .helpers import PATIENCE_SECONDS, train_alone, until
from .spot_run import IDLETRAIN, Launcher, job_tree

NOTICE_SECONDS = 5.0
STEPS = ("record", "group", "identities", "template", "head")


@dataclass
class Night:
    """A disturbed run, as it was found."""

    code: int
    last: dict[str, Any]
    events: list[dict[str, Any]]
    key_lines: set[str]
    texts: dict[str, str]
    inventory: dict[str, list[Any]]
    intruders: dict[str, str]
    second_head: str
    started: float
    job: Job
    ended_alone: set[str] = field(default_factory=set)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture(scope="module")
def run_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cloud")


@pytest.fixture(scope="module")
def own(running: Sandbox) -> Iterator[Account]:
    """The account, for as long as this module's tests last."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield Account()
    running.clean()


@pytest.fixture(scope="module")
def night(running: Sandbox, own: Account, run_home: Path) -> Iterator[Night]:
    """A run during which a node is given notice, one is taken, one killed, a second head and strangers come."""
    tree, started = job_tree("night"), time.time()
    run = Launcher(running, own, tree, run_home)
    try:
        run.until("a round", lambda: run.events("round_committed"))
        key = own.identity("night", "worker").key
        texts = {f"{p.pid}": " ".join(p.cmdline()) for p in processes(running)}
        run_record = record.read(run.prefix)
        texts["user data"] = user_data(own, run_record.site.template)
        second = own.start_head(replace(run_record, generation=99), "idletrain", print)
        scheduler = f"tls://{head_of(own).address}:8786"
        intruders = {name: asyncio.run(knock(scheduler, security)) for name, security in strangers().items()}
        disturb(run)
        until("the second head's end", lambda: running.state(second)["State"]["Name"] == "terminated")
        code = run.process.wait(PATIENCE_SECONDS)
        until("the head's end", lambda: not running.inventory()["processes"])
        texts |= {path.name: path.read_text() for path in running.logs.iterdir()} | {"output": run.output()}
        texts["events"] = json.dumps(run.events())
        yield Night(
            code=code,
            last=run.last() if code == 0 else {"output": run.output()},
            events=run.events(),
            key_lines={line for line in key.splitlines() if "PRIVATE" not in line},
            texts=texts,
            inventory=running.inventory(),
            intruders=intruders,
            second_head=running.log(second),
            started=started,
            job=parse_job(tree),
        )
    finally:
        run.end()


def disturb(run: Launcher) -> None:
    """A recommendation, then a notice, a taking and a kill of nodes that train, one after the other is made good."""
    run.cloud.ask("POST", "rebalance", instance=min(run.workers()))
    run.until("a warning", lambda: run.events("worker_at_risk"))
    for n, disturbance in enumerate((notice, take, kill)):
        nodes = run.until("two workers", lambda: len(there := run.workers()) >= 2 and there)
        disturbance(run, min(nodes))
        run.until("its leaving", lambda n=n: len(run.events("worker_left")) > n)


def notice(run: Launcher, instance: str) -> None:
    run.cloud.ask("POST", "notice", instance=instance, seconds=NOTICE_SECONDS)


def take(run: Launcher, instance: str) -> None:
    run.cloud.ask("POST", "take", instance=instance)


def kill(run: Launcher, instance: str) -> None:
    for process in processes(run.cloud, instance):
        if process.name() == fork_server.title("idletrain", ["worker"]):
            process.kill()


def processes(cloud: Sandbox, instance: str = "") -> list[psutil.Process]:
    pids = [pid for p in cloud.inventory()["processes"] if instance in ("", p["instance"]) for pid in p["pids"]]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def head_of(account: Account, run: str = "night") -> Any:
    heads = [instance for instance in account.instances(run, ("running",)) if instance.role == "head"]
    return min(heads, key=lambda head: head.launched_at)


def user_data(account: Account, template: str) -> str:
    import base64

    result = account.ec2.describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"][0]
    return base64.b64decode(result["LaunchTemplateData"]["UserData"]).decode()


def strangers() -> dict[str, Security]:
    """Peers that must not get in: one without TLS, one with another run's certificate."""
    import datetime

    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    return {"plain": Security(), "other": certificates.issue("other", ("worker",), soon)["worker"].security()}


async def knock(scheduler: str, security: Security) -> str:
    """What becomes of a peer that tries to talk to a scheduler."""
    address = scheduler if security.tls_ca_file else scheduler.replace("tls://", "tcp://")
    try:
        async with rpc(address, connection_args=security.get_connection_args("worker"), timeout=3) as remote:
            await remote.identity()
    except (TimeoutError, OSError, ValueError) as error:
        return f"refused: {error!r}"
    return "let in"


def test_the_run_ends_with_the_bits_of_an_undisturbed_one(night: Night) -> None:
    assert night.code == 0, night.last
    assert night.last["params_sha256"] == train_alone(night.job)[-1]
    staged = Counter((event["round"], event["subnet"]) for event in night.of("staged"))
    assert set(staged.values()) == {1}
    assert len(staged) == 16 * 3


def test_every_disturbance_happened_and_was_made_good(night: Night) -> None:
    causes = [event["cause"] for event in night.of("worker_left") if event["cause"] != "end"]
    assert Counter(causes) == {"notice": 1, "kill": 2}
    reasons = Counter(event["reason"] for event in night.of("instance_ended"))
    assert reasons["Server.SpotInstanceTermination"] == 1
    assert len(night.of("instance_launched")) >= 3 + 3 + 1  # nodes, spare and replacements, the head
    assert len(night.of("worker_at_risk")) == 1


def test_a_noticed_node_s_partial_steps_are_kept(night: Night) -> None:
    noticed = [event for event in night.of("lost") if event["cause"] == "notice"]
    assert all(event["lost_steps"] <= 1 for event in noticed)


def test_nothing_is_left_behind(night: Night) -> None:
    assert not any(night.inventory.values()), night.inventory


def test_keys_are_in_no_log_event_argument_or_user_data(night: Night) -> None:
    assert night.key_lines
    for where, text in night.texts.items():
        assert not [line for line in night.key_lines if line in text], where
        assert "PRIVATE KEY" not in text, where


def test_strangers_are_not_let_in(night: Night) -> None:
    assert {name: text.split(":")[0] for name, text in night.intruders.items()} == dict.fromkeys(
        ("plain", "other"), "refused"
    )


def test_a_second_head_refuses(night: Night) -> None:
    assert "leads the run in s3://" in night.second_head
    assert "Traceback" not in night.second_head


def test_machines_end_by_themselves_before_the_run_may_cost_more(night: Night) -> None:
    first, second = night.texts["user data"].splitlines()[2:4]
    assert second.startswith("shutdown -h +$(( left = (deadline - ")
    assert int(first.removeprefix("deadline=")) <= night.started + night.job.nodes.max_duration + PATIENCE_SECONDS


def job_of(prefix: S3Prefix) -> Job:
    """What a run trains, with what its head chose."""
    result = prefix.get("job.json")
    assert result is not None
    return Job.model_validate_json(result.content)


def launch_until(step: str, cache: Path) -> Job:
    """Launch a run from a process that is killed behind a step."""
    job = parse_job(job_tree(f"killed-{step}"))
    pid = os.fork()
    if not pid:
        account = Account()
        plan = launcher.make_spot_plan(job, account, cache)

        def reached(name: str) -> None:
            if name == step:
                os.kill(os.getpid(), signal.SIGKILL)

        prefix = S3Prefix.at(f"s3://{account.bucket}/runs/{job.name}", account.s3)
        launcher.start(plan, account, prefix, image="idletrain", resume=False, reached=reached)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return job


def test_its_machines_are_forks_of_one_process(night: Night) -> None:
    parents = {text for text in night.texts.values() if f"-m {warm_parent.__name__} " in text.partition("\n")[0]}
    assert len(parents) == 1


def run_command(*arguments: str) -> str:
    done = warm.run([*IDLETRAIN, *arguments, "--cloud", "sandbox"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_of_a_launcher_killed_behind_any_step_reap_and_down_leave_nothing(
    cloud: Sandbox, account: Account, tmp_path: Path
) -> None:
    for step in STEPS:
        job = launch_until(step, tmp_path)
        prefix = S3Prefix.at(f"s3://{account.bucket}/runs/{job.name}", account.s3)
        assert record.read(prefix).state == "running"
    result = cloud.inventory()
    assert (len(result["security_groups"]), len(result["launch_templates"]), len(result["instances"])) == (4, 2, 1)
    reaped = run_command("reap", "--older-than", "0s", "--yes")
    assert [step for step in STEPS if f"killed-{step}: it has no head" in reaped] == ["group", "identities", "template"]
    run_command("down", "killed-head")  # it has a head, which leads the run whoever watches
    run_command("down", "killed-head")
    run_command("down", "killed-record")
    until("the machines' end", lambda: not any(cloud.inventory().values()))
    assert "nothing is left over" in run_command("reap", "--older-than", "0s", "--yes")


def test_a_head_that_is_killed_with_its_machine_is_succeeded_and_the_bits_are_the_same(
    cloud: Sandbox, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = job_tree("headless", rounds=8)
    del tree["training"]["method"]  # which the first head chooses, and how parameters travel
    tree |= {"workdir": str(tmp_path), "model": {**tree["model"], "factory": "mine:net"}}  # which travels
    (tmp_path / "mine.py").write_text("from idletrain.nn.models import mlp as net\n")
    (tmp_path / ".gitignore").write_text("out-*\n.cache/\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = Launcher(cloud, account, tree, tmp_path)
    try:
        first.until("two rounds", lambda: len(first.events("round_committed")) >= 2)
        first.end()
        account.terminate([head_of(account, "headless").id])
        until("the nodes' own end", lambda: not cloud.inventory()["processes"])
    finally:
        first.end()
    second = Launcher(cloud, account, tree, tmp_path, "--resume")
    try:
        assert second.process.wait(PATIENCE_SECONDS) == 0, second.output()
        assert second.last()["params_sha256"] == train_alone(job_of(second.prefix))[-1]
        assert len(second.events("run_started")) == 2
        assert second.events("run_started")[1]["resumed_at"] >= 1
        taken_away = {name: second.prefix.get(name) for name in ("model.safetensors", "summary.json", "report.html")}
        assert all(result and result.content for result in taken_away.values()), taken_away
    finally:
        second.end()
    until("the head's end", lambda: not any(cloud.inventory().values()))


def test_a_launch_asks_before_it_makes_anything_and_detached_goes_on_by_itself(
    cloud: Sandbox, account: Account, tmp_path: Path
) -> None:
    tree = {**job_tree("asked"), "cloud": {"region": cloud.region, "image": "idletrain"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))

    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}

    def launch(answer: str) -> subprocess.CompletedProcess[str]:
        command = [*IDLETRAIN, "launch", str(tmp_path / "job.yaml"), "--spot", "--cloud", "aws", "--detach"]
        return warm.run(command, folder=tmp_path, given=answer, environment=environment)

    declined = launch("n\n")
    assert (declined.returncode, "Start it? [y/N]" in declined.stdout) == (130, True), declined.stderr
    assert not any(cloud.inventory().values())
    assert S3Prefix.at(f"s3://{account.bucket}/runs/asked", account.s3).get(record.RUN_RECORD_KEY) is None
    agreed = launch("y\n")
    assert agreed.returncode == 0, agreed.stderr
    assert "asked goes on by itself" in agreed.stdout
    assert head_of(account, "asked").state in ("pending", "running")
    run_command("down", "asked")
    until("the machines' end", lambda: not any(cloud.inventory().values()))


# At ten times its speed: two nodes, of which one goes every 40 s, the first at 45 s, its replacement there before.
TRACE = """\
0,add,n1
0,add,n2
440000,add,n3
450000,remove,n1
840000,add,n4
850000,remove,n2
1240000,add,n5
1250000,remove,n3
"""


def test_a_run_outlives_a_recorded_trace_in_a_sandbox_of_its_own(tmp_path: Path) -> None:
    tree = job_tree("traced", rounds=10000)
    tree |= {"training": {**tree["training"], "subnets": 2}, "nodes": {"count": 2, "memory": "1GiB"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "runs/traced").mkdir(parents=True)  # another run of that name
    arguments = [
        "launch",
        "job.yaml",
        "--spot",
        "--cloud",
        "sandbox",
        "--trace",
        "trace.csv",
        "--speed",
        "10",
        "--json",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell put into the background
    errors = (tmp_path / "errors").open("w+")
    with (
        errors,
        subprocess.Popen(
            [*IDLETRAIN, *arguments], stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=tmp_path
        ) as run,
    ):
        assert run.stdout is not None
        deadline = threading.Timer(2 * PATIENCE_SECONDS, run.kill)
        deadline.start()
        lines = map(json.loads, run.stdout)
        preempted = next(line for line in lines if sum(line["preemptions"].values()))
        (address,) = (tmp_path / ".cache/idletrain/sandboxes").glob("*/address.json")  # with keys that open all
        assert (address.stat().st_mode & 0o777, address.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert any(line["rounds"] >= preempted["rounds"] + 2 for line in lines)
        going_on = warm.run([*IDLETRAIN, "status", "--json"], environment=environment, folder=tmp_path / ".cache")
        run.send_signal(signal.SIGINT)
        run.wait()
        deadline.cancel()
    assert run.returncode == 130
    assert json.loads(going_on.stdout)["status"] == "running", going_on.stderr  # without its name or its cloud
    said = (tmp_path / "errors").read_text()
    assert "and what traced has trained is in runs/traced-2; go on with it on this machine: idletrain launch" in said
    done = warm.run([*IDLETRAIN, "evaluate", "traced-2", "--json"], environment=environment, folder=tmp_path)
    trained = json.loads(done.stdout)["rounds"]
    assert trained >= preempted["rounds"], done.stderr
    further = said.rpartition(": idletrain ")[2].split()
    log = tmp_path / "further"
    here = warm.start([*IDLETRAIN, *further, "--json"], environment, log, tmp_path)
    first = until("a round of the run here", lambda: re.search(r'"rounds": ([0-9]+),', log.read_text()))
    here.send_signal(signal.SIGINT)
    assert here.wait(PATIENCE_SECONDS) == 130
    assert int(first[1]) > trained
