"""The whole: machines find their cloud, learn of their end, and go when it comes."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import sys
from pathlib import Path

import psutil
from rehearsal import Sandbox, eventually, ids_of

# What a node does: who am I, and what may I do? In plain boto3, with nothing given but the machine's environment.
NODE = f"""
{sys.executable} - <<'END'
import json, boto3
session = boto3.Session(region_name="eu-west-1")
given = session.get_credentials()
arn = session.client("sts").get_caller_identity()["Arn"]
print(json.dumps({{"method": given.method, "key": given.access_key[:4], "arn": arn}}), flush=True)
END
sleep 300
"""
# What a node's watcher does: ask until there is an answer, say it.
WATCH = f"""{sys.executable} -I -S - PATH <<'END'
import os, sys, time, urllib.error, urllib.request
base = os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] + "/latest/"
lifetime = {{"X-aws-ec2-metadata-token-ttl-seconds": "60"}}
token = urllib.request.urlopen(urllib.request.Request(base + "api/token", headers=lifetime, method="PUT")).read()
shown = {{"X-aws-ec2-metadata-token": token.decode()}}
request = urllib.request.Request(base + "meta-data/" + sys.argv[1], headers=shown)
while True:
    try:
        print(urllib.request.urlopen(request).read().decode(), flush=True)
        break
    except urllib.error.HTTPError as error:
        assert error.code == 404
        time.sleep(0.02)
END
sleep 300
"""
ENABLED = {"HttpTokens": "required", "InstanceMetadataTags": "enabled"}


def test_a_machine_gets_its_credentials_from_its_metadata_service(cloud: Sandbox) -> None:
    (id_,) = cloud.start(NODE, IamInstanceProfile={"Name": "idletrain-node"})
    identity = json.loads(eventually(lambda: cloud.log(id_).strip()))
    assert (identity["method"], identity["key"]) == ("iam-role", "ASIA")
    assert ":sts::" in identity["arn"]


def test_a_machine_sees_its_tags_change(cloud: Sandbox) -> None:
    (id_,) = cloud.start(WATCH.replace("PATH", "tags/instance/asked:for"), MetadataOptions=ENABLED)
    eventually(lambda: cloud.pids(id_))
    cloud.ec2.create_tags(Resources=[id_], Tags=[{"Key": "asked:for", "Value": "now"}])
    eventually(lambda: cloud.log(id_) == "now\n")


def test_a_notice_reaches_the_machine_before_its_end(cloud: Sandbox) -> None:
    (id_,) = cloud.start(WATCH.replace("PATH", "spot/instance-action"))
    eventually(lambda: cloud.pids(id_))
    cloud.ask("POST", "notice", instance=id_, seconds=120)
    action = json.loads(eventually(lambda: cloud.log(id_)))
    assert action["action"] == "terminate"
    assert cloud.inventory()["instances"] == [id_]
    cloud.ask("POST", "notice", instance=id_, seconds=0.1)  # in place of the two minutes
    terminated = eventually(lambda: (s := cloud.state(id_))["State"]["Name"] == "terminated" and s)
    assert terminated["StateReason"]["Code"] == "Server.SpotInstanceTermination"


def test_a_rebalance_recommendation_reaches_the_machine_and_takes_nothing(cloud: Sandbox) -> None:
    (id_,) = cloud.start(WATCH.replace("PATH", "events/recommendations/rebalance"))
    cloud.ask("POST", "rebalance", instance=id_)
    assert "noticeTime" in eventually(lambda: cloud.log(id_))
    assert cloud.inventory()["instances"] == [id_]


def test_terminating_an_instance_kills_its_processes(cloud: Sandbox) -> None:
    (id_,) = cloud.start("trap '' TERM; setsid sleep 300 & sleep 300")
    pids = eventually(lambda: len(pids_now := cloud.pids(id_)) == 3 and pids_now)
    cloud.ec2.terminate_instances(InstanceIds=[id_])
    eventually(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_killed_process_leaves_its_instance_to_its_program(cloud: Sandbox) -> None:
    (id_,) = cloud.start("sleep 300; echo survived; sleep 301")
    _, sleep = eventually(lambda: len(pids_now := cloud.pids(id_)) == 2 and pids_now)
    os.kill(sleep, signal.SIGKILL)
    eventually(lambda: "survived" in cloud.log(id_))
    assert cloud.inventory()["instances"] == [id_]


def test_nothing_listens_but_on_loopback(cloud: Sandbox) -> None:
    (id_,) = cloud.start("sleep 300")
    eventually(lambda: cloud.pids(id_))
    sockets = psutil.Process(cloud.process.pid).net_connections("inet")
    listening = [ipaddress.ip_address(s.laddr.ip) for s in sockets if s.status == psutil.CONN_LISTEN]
    assert len(listening) >= 2  # the endpoint and the machine's metadata service
    assert all(address.is_loopback for address in listening)


def test_churn_takes_the_oldest_in_turn_with_a_notice_and_without(tmp_path: Path) -> None:
    cloud = Sandbox(tmp_path, "--churn", "1s", "--notice", "5s")  # a busy machine starts a watcher in seconds
    try:
        template = cloud.template("#!/bin/bash\n" + WATCH.replace("PATH", "spot/instance-action"))
        first, second = (ids_of(cloud.fleet(template, 1))[0] for _ in range(2))
        (head,) = cloud.start("sleep 300", market="on-demand")
        eventually(lambda: cloud.inventory()["instances"] == [head])
        assert cloud.state(first)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
        assert cloud.state(second)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
        assert ("terminate" in cloud.log(first), "terminate" in cloud.log(second)) == (True, False)
    finally:
        cloud.close()


def test_a_trace_bounds_what_runs_and_takes_what_it_took(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n0,add,n2\n500000,remove,n1\n")
    cloud = Sandbox(tmp_path, "--trace", str(trace), "--speed", "100", "--notice", "100ms")
    try:
        template = cloud.template("#!/bin/bash\nsleep 300\n")
        answer = cloud.fleet(template, 3)
        first, second = ids_of(answer)
        assert len(answer["Errors"]) == 1
        eventually(lambda: cloud.inventory()["instances"] == [second])
        assert ids_of(cloud.fleet(template, 1)) == []
        assert cloud.state(first)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    finally:
        cloud.close()
