"""Build the IAM policies of each part of idletrain, as data. Pure.

`infra/aws/idletrain.yaml` creates the same ones; `idletrain doctor` prints the launcher's for those who create roles
by other means. Resources that idletrain starts, changes or ends must have a run's or a schedule's tag, and get it in
the call that creates them. AWS authorizes each resource of a call separately, so one call may need several statements
("Actions, resources, and condition keys for Amazon EC2"; Karpenter's controller policy proves launches like ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from idletrain.cloud.machines import TAG

Policy = dict[str, Any]

HEAD, NODE, STARTER, SCHEDULE = (f"idletrain-{role}" for role in ("head", "node", "starter", "schedule"))
RUN_TAG, SCHEDULE_TAG = f"{TAG}run", f"{TAG}schedule"
# AWS writes the name of a request's attribute in several ways, and some requests carry none.
OF_GROUPS = {"StringEqualsIgnoreCaseIfExists": {"ec2:Attribute": ["groupSet", "groups", "groupId"]}}
ENDED_HEADS_TAG = f"{TAG}ended-heads"  # of the one group that a head may enter
TUNNEL_DOCUMENT = "AWS-StartPortForwardingSession"  # a port, and no shell
DATA_PREFIX = "data"  # the key below which jobs' data is
LAUNCH, LAUNCH_FLEET = ("ec2:RunInstances",), ("ec2:RunInstances", "ec2:CreateFleet")
CREATE_ACTIONS = ("ec2:CreateLaunchTemplate", "ec2:CreateSecurityGroup")
CREATED_RESOURCES = ("instance", "volume", "network-interface")  # created and tagged by a launch
FLEET_RECORDS = ("fleet", "spot-instances-request")  # they cost nothing by themselves, and end with their machines
RUN_RESOURCES = ("launch-template", "security-group")  # a launch uses those of its run


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The account, region and bucket that policies apply to.

    Attributes:
        account: The account's number.
        region: One region, or `*` for all.
        bucket: The bucket of all runs.
        prefix: Key prefix of all runs, without slashes at its ends.
        partition: `aws`, `aws-cn` or `aws-us-gov`.
    """

    account: str
    region: str
    bucket: str
    prefix: str = "runs"
    partition: str = "aws"

    def arn(self, service: str, resource: str) -> str:
        """Return the ARN of a resource of the account in the region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    def ec2(self, *kinds: str) -> list[str]:
        """Return the ARNs of all EC2 resources of these kinds."""
        return [self.arn("ec2", f"{kind}/*") for kind in kinds]

    def public(self, service: str, resource: str) -> str:
        """Return the ARN of a resource of Amazon's own in the region."""
        return f"arn:{self.partition}:{service}:{self.region}::{resource}"

    def iam(self, resource: str) -> str:
        """Return the ARN of a role or an instance profile."""
        return f"arn:{self.partition}:iam::{self.account}:{resource}"

    def objects(self) -> str:
        """Return the ARN of the objects of all runs."""
        return f"arn:{self.partition}:s3:::{self.bucket}/{self.prefix}/*"


def head_policy(scope: Scope) -> Policy:
    """Allow a head node to create its run's resources, to launch and end its fleet, and to delete everything."""
    return _policy(
        *_keep_run(scope),
        *_pull_image(scope),
        _allow("ReadOwnSecrets", ["ssm:GetParameter"], [scope.arn("ssm", "parameter/idletrain/*/head/*")]),
        # A run's group can be deleted once no machine is in it: its head moves to the group of infra/aws for that. Of
        # a machine's attributes, its groups are all that may be changed: its user data, say, is a program.
        _allow("LeaveGroup", ["ec2:ModifyInstanceAttribute"], scope.ec2("instance"), _has_tag(RUN_TAG) | OF_GROUPS),
        _allow("EnterGroup", ["ec2:ModifyInstanceAttribute"], scope.ec2("security-group"), _has_tag(ENDED_HEADS_TAG)),
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
            _in_region(scope),
        ),
    )


def node_policy(scope: Scope) -> Policy:
    """Allow a node to read its code, its data and its certificates; it writes nothing and starts nothing."""
    return _policy(
        _allow("ReadRuns", ["s3:GetObject"], [scope.objects()]),
        _read_data(scope),
        _list_runs(scope),
        *_pull_image(scope),
        _allow("ReadOwnSecrets", ["ssm:GetParameter"], [scope.arn("ssm", "parameter/idletrain/*/worker/*")]),
    )


def starter_policy(scope: Scope) -> Policy:
    """Allow a schedule's starter machine to start a head node, as a person would."""
    return _policy(*_keep_run(scope), *_pull_image(scope), _pass(scope, "PassHead", HEAD, "ec2"))


def schedule_policy(scope: Scope) -> Policy:
    """Allow EventBridge Scheduler to start starter machines."""
    starts = _pass(scope, "PassStarter", STARTER, "ec2")
    return _policy(*_launch(scope, LAUNCH, SCHEDULE_TAG), _tag(scope, LAUNCH), starts)


def launcher_policy(scope: Scope) -> Policy:
    """Allow a person all that a head node may do for its run, and to start head nodes and edit schedules."""
    return _policy(*_keep_run(scope), *_start(scope), *_keep_schedules(scope))


def _keep_run(scope: Scope) -> list[Policy]:
    """Allow all that a run needs, from its first resource to its last."""
    return [
        *_describe_account(scope),
        _allow("Make", CREATE_ACTIONS, scope.ec2(*RUN_RESOURCES), _sets_tags(RUN_TAG, SCHEDULE_TAG)),
        # Neither has tags of its own here; AWS authorizes the tagged group as well.
        _allow(
            "MakeWithin",
            [CREATE_ACTIONS[1], "ec2:AuthorizeSecurityGroupIngress"],
            scope.ec2("security-group-rule", "vpc"),
        ),
        *_launch(scope, LAUNCH_FLEET, RUN_TAG),
        _tag(scope, (*LAUNCH_FLEET, *CREATE_ACTIONS)),
        *_keep_own(scope),
        _pass(scope, "PassNode", NODE, "ec2"),
        _allow("KeepRuns", ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"], [scope.objects()]),
        _read_data(scope),
        _list_runs(scope),
    ]


def _describe_account(scope: Scope) -> list[Policy]:
    """Allow finding out what there is and what it costs."""
    described = (
        "Images",
        "Instances",
        "InstanceTypeOfferings",
        "InstanceTypes",
        "LaunchTemplates",
        "Regions",
        "RouteTables",
        "SecurityGroups",
        "SpotPriceHistory",
        "Subnets",
        "Vpcs",
    )
    return [
        _allow("Look", [f"ec2:Describe{what}" for what in described], ["*"], _in_region(scope)),
        _read_setup(scope),
        _allow("FindImage", ["ssm:GetParameter"], [scope.public("ssm", "parameter/aws/service/*")]),
        _allow("FindPrices", ["pricing:GetProducts", "sts:GetCallerIdentity"], ["*"]),
    ]


def _keep_own(scope: Scope) -> list[Policy]:
    """Allow changing and deleting what carries a run's tag."""
    own = _has_tag(RUN_TAG)
    unmarked = {"ForAllValues:StringNotEquals": {"aws:TagKeys": RUN_TAG}}
    changes = (
        "ec2:AuthorizeSecurityGroupIngress",
        "ec2:DeleteLaunchTemplate",
        "ec2:DeleteSecurityGroup",
        "ec2:GetConsoleOutput",
        "ec2:TerminateInstances",
    )
    secrets = ("AddTagsToResource", "DeleteParameter", "GetParametersByPath", "ListTagsForResource", "PutParameter")
    return [
        _allow("MarkMachines", ["ec2:CreateTags"], scope.ec2("instance"), own | unmarked),
        _allow("KeepOwn", changes, scope.ec2("instance", *RUN_RESOURCES), own),
        _allow(
            "KeepSecrets",
            [f"ssm:{action}" for action in secrets],
            [scope.arn("ssm", "parameter/idletrain"), scope.arn("ssm", "parameter/idletrain/*")],
        ),
    ]


def _launch(scope: Scope, actions: Sequence[str], owned: str) -> list[Policy]:
    """Allow starting machines from a template and group with the tag `owned`; the machines must be tagged as well."""
    records = FLEET_RECORDS if actions == LAUNCH_FLEET else ()
    return [
        _allow("LaunchWith", actions, [scope.public("ec2", "image/*"), *scope.ec2("subnet", *records)]),
        _allow("LaunchFromOwn", actions, scope.ec2(*RUN_RESOURCES), _has_tag(owned)),
        _allow("LaunchTagged", actions, scope.ec2(*CREATED_RESOURCES), _sets_tags(*dict.fromkeys((RUN_TAG, owned)))),
    ]


def _tag(scope: Scope, actions: Sequence[str]) -> Policy:
    """Allow tagging in a call that creates a resource (its kind is in the condition), and at no other time."""
    created = {"StringEquals": {"ec2:CreateAction": [action.partition(":")[2] for action in actions]}}
    return _allow("TagMade", ["ec2:CreateTags"], [scope.arn("ec2", "*")], _sets_tags(RUN_TAG, SCHEDULE_TAG) | created)


def _read_data(scope: Scope) -> Policy:
    """Allow reading jobs' training data in the account's bucket."""
    return _allow("ReadData", ["s3:GetObject"], [f"arn:{scope.partition}:s3:::{scope.bucket}/{DATA_PREFIX}/*"])


def _list_runs(scope: Scope) -> Policy:
    """Allow listing below the prefix. S3 reports a missing object as missing only to callers that may list, and checks
    that without a prefix: otherwise it says that access is denied.
    """
    condition = {"StringLikeIfExists": {"s3:prefix": f"{scope.prefix}/*"}}
    return _allow("ListRuns", ["s3:ListBucket"], [f"arn:{scope.partition}:s3:::{scope.bucket}"], condition)


def _pull_image(scope: Scope) -> list[Policy]:
    """Allow a machine to pull an image from the account's own registry."""
    layers = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    return [
        _allow("LogIntoRegistry", ["ecr:GetAuthorizationToken"], ["*"], _in_region(scope)),
        _allow("PullImage", layers, [scope.arn("ecr", "repository/*")]),
    ]


def _start(scope: Scope) -> list[Policy]:
    # Without this check a session without a document is a shell, whatever documents a policy allows.
    checked = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
    document = scope.public("ssm", f"document/{TUNNEL_DOCUMENT}")
    return [
        _pass(scope, "PassHead", HEAD, "ec2"),
        _allow("OpenTunnel", ["ssm:StartSession"], scope.ec2("instance"), _has_tag(RUN_TAG) | checked),
        _allow("OpenTunnelOnly", ["ssm:StartSession"], [document], checked),
    ]


def _read_setup(scope: Scope) -> Policy:
    """Allow the reads of `idletrain doctor`. EC2's role for spot machines is created once, by an administrator."""
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
            _has_tag(SCHEDULE_TAG),
        ),
        _pass(scope, "PassSchedule", SCHEDULE, "scheduler"),
    ]


def _has_tag(tag: str) -> Policy:
    return {"Null": {f"aws:ResourceTag/{tag}": "false"}}


def _sets_tags(*tags: str) -> Policy:
    return {"ForAnyValue:StringEquals": {"aws:TagKeys": list(tags)}}


def _in_region(scope: Scope) -> Policy:
    return {"StringLike": {"aws:RequestedRegion": scope.region}}


def _pass(scope: Scope, sid: str, role: str, service: str) -> Policy:
    condition = {"StringEquals": {"iam:PassedToService": f"{service}.amazonaws.com"}}
    return _allow(sid, ["iam:PassRole"], [scope.iam(f"role/{role}")], condition)


def _allow(sid: str, actions: Sequence[str], resources: Sequence[str], condition: Policy | None = None) -> Policy:
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement


def _policy(*statements: Policy) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}
