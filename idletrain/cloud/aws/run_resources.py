"""Create what a run's machines need, and start its head. Every call may be repeated.

Each request is patient: AWS may be busy, and may not see yet what the request before has made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from botocore.exceptions import ClientError

from idletrain.cloud.aws import requests, user_data
from idletrain.cloud.aws.clients import Clients
from idletrain.cloud.aws.errors import ErrorKind, code_of, error_kind, explained, ignoring, required
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.machines import TAG, LaunchSite
from idletrain.cloud.record import RunRecord
from idletrain.cluster.identity import Identity
from idletrain.errors import RunError

logger = logging.getLogger(__name__)
ABSENT_GROUP = {"Error": {"Code": "InvalidGroup.NotFound", "Message": "the new group is not listed yet"}}


def prepare_site(
    clients: Clients,
    run: RunRecord,
    image: str,
    identities: Mapping[str, Identity],
    patience: Patience,
    reached: Callable[[str], None],
) -> LaunchSite:
    """Create a run's security group, its certificates' parameters and its launch template; return their place.

    Args:
        clients: Clients of the account.
        run: The run.
        image: The container image that machines run.
        identities: Certificates by role.
        patience: How long to wait where AWS refuses for a moment.
        reached: Called once the group and the parameters are there, with their names.
    """
    group = make_group(clients, run.run, run.site.vpc, run.tags, patience)
    reached("group")
    put_identities(clients, run.run, identities, run.tags, patience)
    reached("identities")
    text = user_data.user_data(run.deadline, image, gpu=run.job["nodes"]["gpu"] > 0)
    site = replace(run.site, group=group)
    profile = run.job["cloud"]["profiles"][1]
    body = requests.launch_template(run.run, site, profile, text, run.tags)
    return replace(site, template=make_template(clients, body, patience))


def start_head(clients: Clients, run: RunRecord, image: str, patience: Patience) -> str:
    """Start a run's head node in the first of its pools with capacity; return its id.

    Raises:
        RunError: no pool has capacity, or the cloud refuses.
    """
    gpu = run.job["nodes"]["gpu"] > 0
    text = user_data.user_data(run.deadline, image) if gpu else ""  # the template's gives GPUs to the container
    profile = run.job["cloud"]["profiles"][0]
    bodies = [requests.head(run.site, pool, profile, run.tags, run.generation, text) for pool in run.heads]
    return start_first(clients, bodies, patience)


def start_first(clients: Clients, bodies: Sequence[Mapping[str, Any]], patience: Patience) -> str:
    """Start one machine by the first request with capacity; return its id. Repeating starts no second one.

    Raises:
        RunError: no request has capacity, or the cloud refuses.
    """
    for body in bodies:
        try:
            answer = patience.request(lambda body=body: _run_instances(clients, body))  # type: ignore[misc]
        except ClientError as error:
            if error_kind(error) is not ErrorKind.CAPACITY:
                with explained():
                    raise
            logger.info("no %s in %s: %s", body["InstanceType"], body["SubnetId"], code_of(error))
        else:
            instance: str = answer[0]["InstanceId"]
            return instance
    raise RunError(
        f"cloud.head: no zone of {clients.region} has capacity for a {bodies[0]['InstanceType']} now; "
        "name another type, or try again in a while"
    )


def _run_instances(clients: Clients, body: Mapping[str, Any]) -> Any:
    return required(clients.launcher.run_instances(**body), "Instances")


def make_group(clients: Clients, run: str, vpc: str, tags: Mapping[str, str], patience: Patience) -> str:
    """Create a run's security group, unless it exists; return its id."""
    body = requests.security_group(run, vpc, tags)

    def create() -> str:
        try:
            group_id: str = required(clients.launcher.create_security_group(**body), "GroupId")
        except ClientError as error:
            if code_of(error) != "InvalidGroup.Duplicate":
                raise
            group_id = _group_of(clients, run, vpc)
        return group_id

    with explained():
        group = patience.request(create)
        ingress = requests.ingress(group)

        def authorize() -> None:
            with ignoring(("InvalidPermission.Duplicate",)):
                clients.launcher.authorize_security_group_ingress(**ingress)

        patience.request(authorize)
    return group


def _group_of(clients: Clients, run: str, vpc: str) -> str:
    """Return the id of a run's group."""
    filters = [{"Name": f"tag:{TAG}run", "Values": [run]}, {"Name": "vpc-id", "Values": [vpc]}]
    groups = required(clients.launcher.describe_security_groups(Filters=filters), "SecurityGroups")
    if not groups:  # it exists, but AWS' lists are only eventually consistent
        raise ClientError(ABSENT_GROUP, "DescribeSecurityGroups")
    group: str = groups[0]["GroupId"]
    return group


def put_identities(
    clients: Clients, run: str, identities: Mapping[str, Identity], tags: Mapping[str, str], patience: Patience
) -> None:
    """Store a run's certificates, by role, as parameters that only its machines may read.

    Raises:
        RunError: other certificates are stored for the run.
    """
    ssm = clients.client("ssm", attempts=1)
    with explained():
        for role, identity in identities.items():
            patience.request(lambda role=role, identity=identity: _put_identity(ssm, run, role, identity, tags))  # type: ignore[misc]


def _put_identity(ssm: Any, run: str, role: str, identity: Identity, tags: Mapping[str, str]) -> None:
    name, value = parameter_name(run, role), identity.as_json()
    try:  # tags are accepted at creation only, so an old one is not overwritten
        ssm.put_parameter(Name=name, Value=value, Type="SecureString", Tags=requests.tag_list(tags))
    except ClientError as error:
        if code_of(error) != "ParameterAlreadyExists":
            raise
        stored = ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"]
        if stored != value:  # else the request before has stored it, and its reply was lost
            raise RunError(
                f"{name} holds the certificates of another run {run}; end it with `idletrain down {run}`"
            ) from None


def parameter_name(run: str, role: str) -> str:
    """Return the name of the parameter that holds a role's certificates."""
    return f"/idletrain/{run}/{role}/tls"


def make_template(clients: Clients, body: Mapping[str, Any], patience: Patience) -> str:
    """Create a launch template; return its id."""
    with explained():
        template: str = patience.request(lambda: _create_template(clients, body))["LaunchTemplateId"]
    return template


def _create_template(clients: Clients, body: Mapping[str, Any]) -> Any:
    return required(clients.launcher.create_launch_template(**body), "LaunchTemplate")
