"""Policies grant what the code calls, on what AWS lets them be narrowed to, and no more: AWS' own table of actions, a
copy of which comes with cfn-lint, says what can be narrowed; a small reader of policies says what follows.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.loaders import Loader

import idletrain
from idletrain.cloud.aws import iam

SCOPE = iam.Scope(account="123456789012", region="eu-central-1", bucket="idletrain-123456789012-eu-central-1")
POLICIES = {
    "head": iam.head_policy(SCOPE),
    "node": iam.node_policy(SCOPE),
    "starter": iam.starter_policy(SCOPE),
    "schedule": iam.schedule_policy(SCOPE),
    "launcher": iam.launcher_policy(SCOPE),
}
STATEMENTS = [
    pytest.param(statement, id=f"{name}-{statement['Sid']}")
    for name, document in POLICIES.items()
    for statement in document["Statement"]
]
RUN_TAG = {"aws:ResourceTag/idletrain:run": "r"}
SCHEDULE_TAG = {"aws:ResourceTag/idletrain:schedule": "s"}
TAGGING = {"aws:TagKeys": ["idletrain:role", "idletrain:run"]}
# Requests that are asked for under another action's name.
ACTIONS = {
    "s3:DeleteObjects": "s3:DeleteObject",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
}
NAMED_BY_KIND = ("ec2", "iam", "scheduler", "ssm")  # services whose resources are called KIND/NAME
CLIENT = re.compile(r"(client|launcher|ec2|ssm|s3|sts|pricing|scheduler|quotas)\b[^.]*$")  # what calls are made on
SERVICES = ("ec2", "ecr", "iam", "pricing", "s3", "scheduler", "service-quotas", "ssm", "sts")


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """AWS' table: service, `Actions`, action in lower case, `Resources` (none if it cannot be narrowed)."""
    spec = importlib.util.find_spec("cfnlint")
    assert spec
    assert spec.origin
    table = Path(spec.origin).parent / "data" / "AdditionalSpecs" / "Policies.json"
    actions: dict[str, Any] = json.loads(table.read_text())
    return actions


def kinds(known: Mapping[str, Any], action: str) -> list[str]:
    """Kinds of resource that an action can be narrowed to."""
    service, _, name = action.partition(":")
    resources: list[str] = known[service]["Actions"][name.lower()].get("Resources", [])
    return resources


def allows(name: str, action: str, resource: str, **context: Any) -> bool:
    """Whether a policy allows an action on one resource."""
    return any(
        action in statement["Action"]
        and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"])
        and all(
            holds(operator, context.get(key), wanted)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
        for statement in POLICIES[name]["Statement"]
    )


def holds(operator: str, value: Any, wanted: Any) -> bool:
    match operator:
        case "Null":
            return (value is None) == (wanted == "true")
        case "StringEquals":
            return value in (wanted if isinstance(wanted, list) else [wanted])
        case "BoolIfExists":
            return value in (None, wanted)
        case "StringEqualsIgnoreCaseIfExists":
            return value is None or value.lower() in [item.lower() for item in wanted]
        case "StringLike":
            return value is not None and fnmatchcase(value, wanted)
        case "StringLikeIfExists":
            return value is None or fnmatchcase(value, wanted)
        case "ForAnyValue:StringEquals":
            return bool({*(value or [])} & {*wanted})
        case "ForAllValues:StringNotEquals":
            return wanted not in (value or [])
    raise AssertionError(f"no test knows the operator {operator}")


def ec2(kind: str) -> str:
    return f"arn:aws:ec2:eu-central-1:123456789012:{kind}/x-1"


def secret(path: str) -> str:
    return f"arn:aws:ssm:eu-central-1:123456789012:parameter/{path}"


def run_object(key: str) -> str:
    return f"arn:aws:s3:::{SCOPE.bucket}/{key}"


def called() -> Iterator[set[str]]:
    """For each request to AWS in the package, the actions it may stand for: some names are several services'."""
    named: dict[str, set[str]] = {}
    for service in SERVICES:
        for operation in Loader().load_service_model(service, "service-2")["operations"]:
            action = f"{service.replace('-', '')}:{operation}"
            named.setdefault(xform_name(operation), set()).add(ACTIONS.get(action, action))
    for path in Path(idletrain.__file__).parent.rglob("*.py"):
        if "sandbox" not in path.parts:  # the other side of these requests
            for node in ast.walk(ast.parse(path.read_text())):
                if name := _request(node):
                    yield from filter(None, [named.get(name)])


def _request(node: ast.AST) -> str | None:
    """The name of a client's method, called or paginated, if this is one."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr == "get_paginator" and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return node.func.attr if CLIENT.search(ast.unparse(node.func.value)) else None


def test_a_launcher_or_a_head_may_do_whatever_the_code_asks_of_aws() -> None:
    statements = POLICIES["launcher"]["Statement"] + POLICIES["head"]["Statement"]
    granted = {action for statement in statements for action in statement["Action"]}
    requests = list(called())
    assert {"ec2:CreateFleet"} in requests
    assert [actions for actions in requests if not actions & granted] == []


def test_a_launcher_may_do_what_a_head_may_for_others() -> None:
    missing = [s["Sid"] for s in POLICIES["head"]["Statement"] if s not in POLICIES["launcher"]["Statement"]]
    assert missing == ["LogIntoRegistry", "PullImage", "ReadOwnSecrets", "LeaveGroup", "EnterGroup", "CarryTunnel"]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_action_is_one_of_aws_and_none_is_a_pattern(known: dict[str, Any], statement: dict[str, Any]) -> None:
    for action in statement["Action"]:
        service, _, name = action.partition(":")
        assert name.lower() in known[service]["Actions"], action


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_resource_is_of_a_kind_that_an_action_takes(known: dict[str, Any], statement: dict[str, Any]) -> None:
    if statement["Resource"] == ["*"]:
        for action in statement["Action"]:  # narrowed by a condition, or AWS lets nobody narrow it
            assert "Condition" in statement or not kinds(known, action), action
        return
    for resource in statement["Resource"]:
        kind = resource.split(":", 5)[-1].partition("/")[0]
        if kind == "*":  # which kind it is follows from the call that makes it
            assert "ec2:CreateAction" in statement["Condition"]["StringEquals"]
        elif resource.split(":")[2] in NAMED_BY_KIND:
            assert any(kind in kinds(known, action) for action in statement["Action"]), resource


def test_policies_have_the_size_that_iam_takes() -> None:
    """IAM counts without white space: 6,144 characters for a managed policy, 10,240 for a role's own."""
    for document in POLICIES.values():
        assert len(json.dumps(document, separators=(",", ":"))) <= 6144


@pytest.mark.parametrize("name", ["head", "launcher"])
def test_only_machines_of_runs_are_ended_and_marked(name: str) -> None:
    for action, kind in (
        ("ec2:TerminateInstances", "instance"),
        ("ec2:DeleteSecurityGroup", "security-group"),
        ("ec2:DeleteLaunchTemplate", "launch-template"),
    ):
        assert allows(name, action, ec2(kind), **RUN_TAG)
        assert not allows(name, action, ec2(kind))
    assert allows(name, "ec2:CreateTags", ec2("instance"), **RUN_TAG, **{"aws:TagKeys": ["idletrain:notice"]})
    assert not allows(name, "ec2:CreateTags", ec2("instance"), **RUN_TAG, **{"aws:TagKeys": ["idletrain:run"]})
    assert not allows(name, "ec2:CreateTags", ec2("instance"), **{"aws:TagKeys": ["idletrain:notice"]})
    assert not allows(name, "ec2:CreateTags", ec2("instance"), **TAGGING)  # would make a stranger's machine ours


@pytest.mark.parametrize(
    ("name", "action", "owned"),
    [
        ("head", "ec2:RunInstances", RUN_TAG),
        ("head", "ec2:CreateFleet", RUN_TAG),
        ("launcher", "ec2:RunInstances", RUN_TAG),
        ("launcher", "ec2:CreateFleet", RUN_TAG),
        ("schedule", "ec2:RunInstances", SCHEDULE_TAG),
    ],
)
def test_launches_take_ones_own_template_and_tag_what_they_make(name: str, action: str, owned: dict[str, str]) -> None:
    assert allows(name, action, "arn:aws:ec2:eu-central-1::image/ami-1")
    assert allows(name, action, ec2("subnet"))
    for kind in ("launch-template", "security-group"):
        assert allows(name, action, ec2(kind), **owned)
        assert not allows(name, action, ec2(kind))
    for kind in ("instance", "volume", "network-interface"):
        assert allows(name, action, ec2(kind), **TAGGING)
        assert not allows(name, action, ec2(kind))
        assert not allows(name, action, ec2(kind), **{"aws:TagKeys": ["Name"]})
    context = {**TAGGING, "ec2:CreateAction": action.partition(":")[2]}
    assert allows(name, "ec2:CreateTags", ec2("instance"), **context)


def test_schedules_start_no_fleets_and_nodes_start_nothing() -> None:
    assert not allows("schedule", "ec2:CreateFleet", ec2("instance"), **TAGGING)
    assert not allows("schedule", "ec2:RunInstances", ec2("spot-instances-request"), **TAGGING)
    assert not allows("schedule", "ec2:RunInstances", ec2("launch-template"), **RUN_TAG)
    assert not allows("node", "ec2:RunInstances", ec2("instance"), **TAGGING)


def test_each_role_reads_its_own_secrets_alone() -> None:
    for name, role, other in (("node", "worker", "head"), ("head", "head", "worker")):
        assert allows(name, "ssm:GetParameter", secret(f"idletrain/r/{role}/tls"))
        assert not allows(name, "ssm:GetParameter", secret(f"idletrain/r/{other}/tls"))
        assert not allows(name, "ssm:GetParameter", secret(f"idletrain/{role}/{other}/tls"))  # a run of that name
        assert not allows(name, "ssm:GetParameter", secret("elsewhere"))
    assert not allows("node", "ssm:PutParameter", secret("idletrain/r/worker/tls"))


def test_nodes_read_runs_and_write_nothing() -> None:
    assert allows("node", "s3:GetObject", run_object("runs/r/workdir.tar.gz"))
    assert not allows("node", "s3:GetObject", run_object("elsewhere"))
    assert all(allows(who, "s3:GetObject", run_object("data/train.npz")) for who in ("node", "head", "launcher"))
    for action in ("s3:PutObject", "s3:DeleteObject"):
        assert allows("head", action, run_object("runs/r/ledger"))
        assert not allows("head", action, run_object("elsewhere"))
        assert not allows("node", action, run_object("runs/r/ledger"))


def test_listing_stays_below_the_prefix_and_can_tell_that_an_object_is_not_there() -> None:
    bucket = f"arn:aws:s3:::{SCOPE.bucket}"
    for name in ("head", "node", "launcher"):
        assert allows(name, "s3:ListBucket", bucket, **{"s3:prefix": "runs/r/"})
        assert not allows(name, "s3:ListBucket", bucket, **{"s3:prefix": ""})
        assert not allows(name, "s3:ListBucket", bucket, **{"s3:prefix": "else"})
        assert allows(name, "s3:ListBucket", bucket)  # what S3 asks when an object is missing


def test_what_a_schedule_needs_is_made_and_taken_away_by_a_person() -> None:
    for kind, verb in (("launch-template", "LaunchTemplate"), ("security-group", "SecurityGroup")):
        assert allows("launcher", f"ec2:Create{verb}", ec2(kind), **{"aws:TagKeys": ["idletrain:schedule"]})
        assert allows("launcher", f"ec2:Delete{verb}", ec2(kind), **SCHEDULE_TAG)
        assert not allows("head", f"ec2:Delete{verb}", ec2(kind), **SCHEDULE_TAG)


@pytest.mark.parametrize(
    ("name", "role", "service"),
    [
        ("head", "idletrain-node", "ec2"),
        ("schedule", "idletrain-starter", "ec2"),
        ("starter", "idletrain-head", "ec2"),
        ("launcher", "idletrain-head", "ec2"),
        ("launcher", "idletrain-node", "ec2"),
        ("launcher", "idletrain-schedule", "scheduler"),
    ],
)
def test_roles_are_passed_to_the_one_service_they_are_for(name: str, role: str, service: str) -> None:
    arn = "arn:aws:iam::123456789012:role/"
    assert allows(name, "iam:PassRole", arn + role, **{"iam:PassedToService": f"{service}.amazonaws.com"})
    assert not allows(name, "iam:PassRole", arn + role, **{"iam:PassedToService": "lambda.amazonaws.com"})
    assert not allows(name, "iam:PassRole", arn + "admin", **{"iam:PassedToService": f"{service}.amazonaws.com"})


def test_nobody_passes_on_a_role_as_strong_as_their_own() -> None:
    to = {"iam:PassedToService": "ec2.amazonaws.com"}
    for name in ("head", "node", "schedule"):
        assert not allows(name, "iam:PassRole", "arn:aws:iam::123456789012:role/idletrain-head", **to)
    for name in ("head", "node", "starter", "launcher"):
        assert not allows(name, "iam:PassRole", "arn:aws:iam::123456789012:role/idletrain-starter", **to)


def test_a_tunnel_is_a_port_of_a_runs_machine_and_no_shell() -> None:
    document = "arn:aws:ssm:eu-central-1::document/"
    checks = {"ssm:SessionDocumentAccessCheck": "true"}
    assert allows("launcher", "ssm:StartSession", ec2("instance"), **RUN_TAG, **checks)
    assert not allows("launcher", "ssm:StartSession", ec2("instance"), **checks)
    assert not allows("launcher", "ssm:StartSession", ec2("instance"), **RUN_TAG, **dict.fromkeys(checks, "false"))
    assert allows("launcher", "ssm:StartSession", document + "AWS-StartPortForwardingSession", **checks)
    assert not allows("launcher", "ssm:StartSession", document + "SSM-SessionManagerRunShell", **checks)


def test_looking_stays_in_the_region() -> None:
    assert allows("head", "ec2:DescribeInstances", "*", **{"aws:RequestedRegion": "eu-central-1"})
    assert not allows("head", "ec2:DescribeInstances", "*", **{"aws:RequestedRegion": "us-east-1"})


def test_a_head_may_change_the_groups_of_machines_of_runs_and_nothing_else_of_them() -> None:
    change = "ec2:ModifyInstanceAttribute"
    assert allows("head", change, ec2("instance"), **RUN_TAG)
    assert allows("head", change, ec2("instance"), **RUN_TAG, **{"ec2:Attribute": "GroupSet"})
    for attribute in ("userData", "InstanceType", "instanceInitiatedShutdownBehavior", "disableApiTermination"):
        assert not allows("head", change, ec2("instance"), **RUN_TAG, **{"ec2:Attribute": attribute})
    assert not allows("head", change, ec2("instance"), **{"ec2:Attribute": "groupSet"})
    assert not allows("node", change, ec2("instance"), **RUN_TAG)


def test_a_head_enters_the_group_of_heads_that_end_and_no_other() -> None:
    change = "ec2:ModifyInstanceAttribute"
    assert allows("head", change, ec2("security-group"), **{"aws:ResourceTag/idletrain:ended-heads": "true"})
    assert not allows("head", change, ec2("security-group"))
    assert not allows("head", change, ec2("security-group"), **{"aws:ResourceTag/team": "bank"})
