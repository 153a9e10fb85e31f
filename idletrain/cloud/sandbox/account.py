"""Create what an AWS account has before the first launch: a bucket, roles, the group of heads that end, and internet
access of the default network. moto provides that network and the machine images' parameters.
"""

from __future__ import annotations

import json

from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends

from idletrain.cloud.aws.iam import ENDED_HEADS_TAG
from idletrain.cloud.sandbox.instances import ACCOUNT_ID, REGION

BUCKET = f"idletrain-{ACCOUNT_ID}-{REGION}"  # as infra/aws names it
IAM_ROLES = ("idletrain-head", "idletrain-node", "idletrain-starter")
EC2_MAY_ASSUME = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"},
        ],
    }
)


def provision() -> None:
    """Create bucket, internet route and roles in moto's account."""
    s3_backends[ACCOUNT_ID]["aws"].create_bucket(BUCKET, REGION)
    ec2 = ec2_backends[ACCOUNT_ID][REGION]
    vpc, gateway = ec2.get_default_vpc(), ec2.create_internet_gateway()
    assert vpc
    ec2.attach_internet_gateway(gateway.id, vpc.id)
    (table,) = ec2.describe_route_tables(filters={"vpc-id": [vpc.id], "association.main": ["true"]})
    ec2.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
    ended = ec2.create_security_group("idletrain-ended-heads", "Heads that have ended their runs", vpc.id)
    ec2.create_tags([ended.id], {ENDED_HEADS_TAG: "true"})
    iam = iam_backends[ACCOUNT_ID]["aws"]
    for role in IAM_ROLES:
        iam.create_role(role, EC2_MAY_ASSUME, "/", None, "", [], "3600")
        iam.create_instance_profile(role, "/", [])
        iam.add_role_to_instance_profile(role, role)
