"""What each part of idletrain may do in an AWS account: IAM policies as data, and nothing that asks a cloud.

`infra/aws/idletrain.yaml` makes the same ones; `idletrain doctor` prints the launcher's for who makes roles elsewhere.
What idletrain starts, changes or ends must carry a run's or a schedule's tag, and gets it in the call that makes it.
AWS asks for each resource of a call by itself, so one call may need several statements ("Actions, resources, and
condition keys for Amazon EC2"; Karpenter's controller policy is where launches like ours are known to work).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from idletrain.cloud.aws.requests import TAG

Policy = dict[str, Any]

HEAD, NODE, STARTER, SCHEDULE = (f"idletrain-{role}" for role in ("head", "node", "starter", "schedule"))
RUN_TAG, SCHEDULE_TAG = f"{TAG}run", f"{TAG}schedule"
TUNNEL_DOCUMENT = "AWS-StartPortForwardingSession"  # a port, and no shell
DATA_PREFIX = "data"  # the key below which jobs' data is
LAUNCH, LAUNCH_FLEET = ("ec2:RunInstances",), ("ec2:RunInstances", "ec2:CreateFleet")
CREATE_ACTIONS = ("ec2:CreateLaunchTemplate", "ec2:CreateSecurityGroup")
CREATED_RESOURCES = ("instance", "volume", "network-interface")  # what a launch makes, and tags
FLEET_RECORDS = ("fleet", "spot-instances-request")  # they cost nothing by themselves, and end with their machines
RUN_RESOURCES = ("launch-template", "security-group")  # what a launch takes from its run


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where policies hold.

    Attributes:
        account: The account's number.
        region: One region, or `*` for all.
        bucket: The bucket of all runs.
        prefix: The key below which they are, without slashes at its ends.
        partition: `aws`, `aws-cn` or `aws-us-gov`.
    """

    account: str
    region: str
    bucket: str
    prefix: str = "runs"
    partition: str = "aws"

    def arn(self, service: str, resource: str) -> str:
        """A resource of the account in the region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    def ec2(self, *kinds: str) -> list[str]:
        """All EC2 resources of these kinds."""
        return [self.arn("ec2", f"{kind}/*") for kind in kinds]

    def public(self, service: str, resource: str) -> str:
        """A resource of Amazon's own in the region."""
        return f"arn:{self.partition}:{service}:{self.region}::{resource}"

    def iam(self, resource: str) -> str:
        """A role or a profile."""
        return f"arn:{self.partition}:iam::{self.account}:{resource}"

    def objects(self) -> str:
        """The objects of all runs."""
        return f"arn:{self.partition}:s3:::{self.bucket}/{self.prefix}/*"


def head_policy(scope: Scope) -> Policy:
    """A head makes what its run needs, if no person did, keeps its fleet, and clears everything away at the end."""
    return _policy(
        *_keep_run(scope),
        *_pull_image(scope),
        _allow("ReadOwnSecrets", ["ssm:GetParameter"], [scope.arn("ssm", "parameter/idletrain/*/head/*")]),
        # A run's group can be deleted once no machine is in it: its head moves to the network's default group.
        _allow("LeaveGroup", ["ec2:ModifyInstanceAttribute"], scope.ec2("instance"), _marked(RUN_TAG)),
        _allow("EnterGroup", ["ec2:ModifyInstanceAttribute"], scope.ec2("security-group")),
        _allow(
            "CarryTunnel",
            [
                "ssm:UpdateInstanceInformation",
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            ],
            ["*"],
            _within(scope),
        ),
    )


def node_policy(scope: Scope) -> Policy:
    """A node reads its program and its certificates; it writes nothing and starts nothing."""
    return _policy(
        _allow("ReadRuns", ["s3:GetObject"], [scope.objects()]),
        _read_data(scope),
        _list_runs(scope),
        *_pull_image(scope),
        _allow("ReadOwnSecrets", ["ssm:GetParameter"], [scope.arn("ssm", "parameter/idletrain/*/worker/*")]),
    )


def starter_policy(scope: Scope) -> Policy:
    """A schedule's machine starts a head, as a person would, and ends."""
    return _policy(*_keep_run(scope), *_pull_image(scope), _pass(scope, "PassHead", HEAD, "ec2"))


def schedule_policy(scope: Scope) -> Policy:
    """EventBridge Scheduler starts starters."""
    starts = _pass(scope, "PassStarter", STARTER, "ec2")
    return _policy(*_launch(scope, LAUNCH, SCHEDULE_TAG), _tag(scope, LAUNCH), starts)


def launcher_policy(scope: Scope) -> Policy:
    """A person does all that a head does for its run, starts heads, and keeps schedules."""
    return _policy(*_keep_run(scope), *_start(scope), *_keep_schedules(scope))


def _keep_run(scope: Scope) -> list[Policy]:
    return [
        _allow(
            "Look",
            [
                "ec2:DescribeImages",
                "ec2:DescribeInstances",
                "ec2:DescribeInstanceTypeOfferings",
                "ec2:DescribeInstanceTypes",
                "ec2:DescribeLaunchTemplates",
                "ec2:DescribeRegions",
                "ec2:DescribeRouteTables",
                "ec2:DescribeSecurityGroups",
                "ec2:DescribeSpotPriceHistory",
                "ec2:DescribeSubnets",
                "ec2:DescribeVpcs",
            ],
            ["*"],
            _within(scope),
        ),
        _look_into(scope),
        _allow("FindImage", ["ssm:GetParameter"], [scope.public("ssm", "parameter/aws/service/*")]),
        _allow("FindPrices", ["pricing:GetProducts", "sts:GetCallerIdentity"], ["*"]),
        _allow("Make", CREATE_ACTIONS, scope.ec2(*RUN_RESOURCES), _making(RUN_TAG, SCHEDULE_TAG)),
        # Neither has tags of its own here; a group that has them is asked for as well.
        _allow(
            "MakeWithin",
            [CREATE_ACTIONS[1], "ec2:AuthorizeSecurityGroupIngress"],
            scope.ec2("security-group-rule", "vpc"),
        ),
        *_launch(scope, LAUNCH_FLEET, RUN_TAG),
        _tag(scope, (*LAUNCH_FLEET, *CREATE_ACTIONS)),
        _allow(
            "MarkMachines",
            ["ec2:CreateTags"],
            scope.ec2("instance"),
            _marked(RUN_TAG) | {"ForAllValues:StringNotEquals": {"aws:TagKeys": RUN_TAG}},
        ),
        _allow(
            "KeepOwn",
            [
                "ec2:AuthorizeSecurityGroupIngress",
                "ec2:DeleteLaunchTemplate",
                "ec2:DeleteSecurityGroup",
                "ec2:GetConsoleOutput",
                "ec2:TerminateInstances",
            ],
            scope.ec2("instance", *RUN_RESOURCES),
            _marked(RUN_TAG),
        ),
        _allow(
            "KeepSecrets",
            [
                "ssm:AddTagsToResource",
                "ssm:DeleteParameter",
                "ssm:GetParametersByPath",
                "ssm:ListTagsForResource",
                "ssm:PutParameter",
            ],
            [scope.arn("ssm", "parameter/idletrain"), scope.arn("ssm", "parameter/idletrain/*")],
        ),
        _pass(scope, "PassNode", NODE, "ec2"),
        _allow("KeepRuns", ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"], [scope.objects()]),
        _read_data(scope),
        _list_runs(scope),
    ]


def _launch(scope: Scope, actions: Sequence[str], owned: str) -> list[Policy]:
    """Start machines, from a template and group that carry the tag `owned`; what is made is tagged as well."""
    records = FLEET_RECORDS if actions == LAUNCH_FLEET else ()
    return [
        _allow("LaunchWith", actions, [scope.public("ec2", "image/*"), *scope.ec2("subnet", *records)]),
        _allow("LaunchFromOwn", actions, scope.ec2(*RUN_RESOURCES), _marked(owned)),
        _allow("LaunchTagged", actions, scope.ec2(*CREATED_RESOURCES), _making(*dict.fromkeys((RUN_TAG, owned)))),
    ]


def _tag(scope: Scope, actions: Sequence[str]) -> Policy:
    """Tags in a call that makes something, which says of what kind, and at no other time."""
    created = {"StringEquals": {"ec2:CreateAction": [action.partition(":")[2] for action in actions]}}
    return _allow("TagMade", ["ec2:CreateTags"], [scope.arn("ec2", "*")], _making(RUN_TAG, SCHEDULE_TAG) | created)


def _read_data(scope: Scope) -> Policy:
    """What jobs train on, where it is in the account's bucket."""
    return _allow("ReadData", ["s3:GetObject"], [f"arn:{scope.partition}:s3:::{scope.bucket}/{DATA_PREFIX}/*"])


def _list_runs(scope: Scope) -> Policy:
    """Listing below the prefix. S3 says that an object is not there only to who may list, and asks for that without a
    prefix: else it says that access is denied.
    """
    condition = {"StringLikeIfExists": {"s3:prefix": f"{scope.prefix}/*"}}
    return _allow("ListRuns", ["s3:ListBucket"], [f"arn:{scope.partition}:s3:::{scope.bucket}"], condition)


def _pull_image(scope: Scope) -> list[Policy]:
    """What a machine needs to run an image from the account's own registry."""
    layers = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    return [
        _allow("LogIntoRegistry", ["ecr:GetAuthorizationToken"], ["*"], _within(scope)),
        _allow("PullImage", layers, [scope.arn("ecr", "repository/*")]),
    ]


def _start(scope: Scope) -> list[Policy]:
    # Without this check a session that names no document is a shell, whatever documents a policy allows.
    checked = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
    document = scope.public("ssm", f"document/{TUNNEL_DOCUMENT}")
    return [
        _pass(scope, "PassHead", HEAD, "ec2"),
        _allow("OpenTunnel", ["ssm:StartSession"], scope.ec2("instance"), _marked(RUN_TAG) | checked),
        _allow("OpenTunnelOnly", ["ssm:StartSession"], [document], checked),
    ]


def _look_into(scope: Scope) -> Policy:
    """What `idletrain doctor` looks at. The role that EC2 needs for spot machines is made once, by an administrator."""
    return _allow(
        "LookInto",
        ["ecr:DescribeImages", "iam:GetInstanceProfile", "iam:GetRole", "servicequotas:GetServiceQuota"],
        [
            scope.arn("ecr", "repository/*"),
            scope.iam(f"instance-profile/{HEAD}"),
            scope.iam(f"instance-profile/{NODE}"),
            scope.iam("role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"),
            scope.arn("servicequotas", "ec2/*"),
        ],
    )


def _keep_schedules(scope: Scope) -> list[Policy]:
    return [
        _allow(
            "KeepSchedules",
            ["scheduler:CreateSchedule", "scheduler:DeleteSchedule", "scheduler:GetSchedule"],
            [scope.arn("scheduler", "schedule/default/idletrain-*")],
        ),
        _allow(
            "KeepScheduled",
            ["ec2:AuthorizeSecurityGroupIngress", "ec2:DeleteLaunchTemplate", "ec2:DeleteSecurityGroup"],
            scope.ec2(*RUN_RESOURCES),
            _marked(SCHEDULE_TAG),
        ),
        _pass(scope, "PassSchedule", SCHEDULE, "scheduler"),
    ]


def _marked(tag: str) -> Policy:
    return {"Null": {f"aws:ResourceTag/{tag}": "false"}}


def _making(*tags: str) -> Policy:
    return {"ForAnyValue:StringEquals": {"aws:TagKeys": list(tags)}}


def _within(scope: Scope) -> Policy:
    return {"StringLike": {"aws:RequestedRegion": scope.region}}


def _pass(scope: Scope, sid: str, role: str, service: str) -> Policy:
    to = {"StringEquals": {"iam:PassedToService": f"{service}.amazonaws.com"}}
    return _allow(sid, ["iam:PassRole"], [scope.iam(f"role/{role}")], to)


def _allow(sid: str, actions: Sequence[str], resources: Sequence[str], condition: Policy | None = None) -> Policy:
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement


def _policy(*statements: Policy) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}
