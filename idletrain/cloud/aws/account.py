"""Call AWS: thin, blocking calls that are safe to repeat. `requests` builds their bodies and reads their answers.

A second EC2 client never retries: botocore treats a lack of capacity as a server error and would try four times.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
from botocore.parsers import ResponseParserError

from idletrain.cloud.aws import network_routes, pricing, requests
from idletrain.cloud.aws.requests import TAG, LaunchOutcome, LaunchSite, Pool
from idletrain.cluster.identity import Identity
from idletrain.errors import JobError, RunError

logger = logging.getLogger(__name__)
AMI_PARAMETERS = {
    False: "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id",
    True: "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
}
ALIVE_STATES = ("pending", "running", "stopping", "stopped")
RUNNING_STATES = ("pending", "running")
RELEASE_SECONDS = (
    300.0  # a group can be deleted once no interface uses it: minutes after its machines began to terminate
)
RELEASE_PAUSE_SECONDS = 1.0
NOT_FOUND_CODES = ("InvalidInstanceID.NotFound", "InvalidGroup.NotFound", "InvalidLaunchTemplateId.NotFound")


@dataclass(frozen=True)
class Instance:
    """A machine as EC2 describes it."""

    id: str
    state: str
    pool: Pool
    launched_at: float
    address: str
    tags: Mapping[str, str]
    reason: str

    @property
    def run(self) -> str:
        """Name of the run that it belongs to."""
        return self.tags[TAG + "run"]

    @property
    def head_session(self) -> str:
        """Start time of its session of the run, by the launcher's clock, from its tags."""
        return self.tags.get(TAG + "created", "")

    @property
    def role(self) -> str:
        """`head` or `worker`."""
        return self.tags.get(TAG + "role", "")


@dataclass(frozen=True)
class LeftoverResource:
    """A resource of a run that is not a machine."""

    kind: Literal["group", "template", "parameter"]
    id: str
    tags: Mapping[str, str]


@contextlib.contextmanager
def explained(unless: Collection[str] = ()) -> Iterator[None]:
    """Turn errors of AWS into one sentence; unknown errors keep AWS' own message.

    Args:
        unless: Error codes that the caller handles: they are raised as they are.

    Raises:
        JobError: there are no credentials or no region.
        RunError: anything else.
    """
    try:
        yield
    except NoCredentialsError:
        raise JobError("AWS: there are no credentials; run `aws configure`, or set AWS_PROFILE") from None
    except NoRegionError:
        raise JobError("cloud.region: no region is set; name one, such as region: eu-west-1") from None
    except ClientError as error:
        if _code(error) in unless:
            raise
        code, message = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
        raise RunError(
            f"AWS refuses {error.operation_name}: {code}: {message}; `idletrain doctor` may say why"
        ) from None
    except BotoCoreError as error:
        raise RunError(f"AWS cannot be reached: {error}; check the network and `idletrain doctor`") from None
    except ResponseParserError as error:
        raise RunError(f"AWS is not what answers: {_first_line(error)}; check the network and proxies") from None


class Account:
    """An AWS account in one region.

    Args:
        region: The region; None for the one of AWS' own configuration.
    """

    def __init__(self, region: str | None = None) -> None:
        with explained():
            self._session = boto3.Session(region_name=region)
            if not self._session.region_name:
                raise NoRegionError
        self.region: str = self._session.region_name

    # Clients are created on first use: a node needs two of them, and each takes a tenth of a second.

    @functools.cached_property
    def ec2(self) -> Any:
        """Client of EC2, with retries."""
        return self.client("ec2")

    @functools.cached_property
    def _launcher(self) -> Any:
        return self.client("ec2", attempts=1)

    @functools.cached_property
    def ssm(self) -> Any:
        """Client of the parameter store."""
        return self.client("ssm")

    @functools.cached_property
    def s3(self) -> Any:
        """Client of S3."""
        return self.client("s3")

    def client(self, service: str, region: str | None = None, attempts: int = 10) -> Any:
        """Create a client of a service."""
        config = Config(retries={"mode": "standard", "total_max_attempts": attempts})
        with explained():
            return self._session.client(service, region_name=region or self.region, config=config)

    @functools.cached_property
    def owner(self) -> str:
        """ARN of the identity that calls AWS."""
        with explained():
            arn: str = self.client("sts").get_caller_identity()["Arn"]
            return arn

    @property
    def number(self) -> str:
        """Number of the account."""
        return str(self.owner).split(":")[4]

    @property
    def bucket(self) -> str:
        """Name of the bucket that infra/aws creates for the account in this region."""
        return f"idletrain-{self.number}-{self.region}"

    def console(self, instance: str) -> str:
        """Return the console output of a machine, as far as the cloud has kept it."""
        with explained():
            output: str = self.ec2.get_console_output(InstanceId=instance).get("Output", "")
            return output

    # --- descriptions -------------------------------------------------------------------------------------------

    def site(self, ami: str | None, gpu: bool) -> LaunchSite:
        """Return the network (that of infra/aws before the region's default one) and the machine image.

        Args:
            ami: The machine image; None for Amazon's own.
            gpu: Whether Amazon's image needs GPU drivers.

        Raises:
            JobError: a network or image is missing, or machines in the network would have no internet access.
        """
        with explained():
            ours = self.ec2.describe_vpcs(Filters=[{"Name": "tag-key", "Values": [f"{TAG}network"]}])["Vpcs"]
            default = self.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
            if not ours + default:
                raise JobError(f"cloud.region: {self.region} has no default VPC; deploy infra/aws with Network=true")
            vpc = (ours + default)[0]["VpcId"]
            in_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
            subnets = network_routes.subnets_with_internet(
                self.ec2.describe_subnets(Filters=in_vpc)["Subnets"],
                self.ec2.describe_route_tables(Filters=in_vpc)["RouteTables"],
            )
            if not subnets:
                raise JobError(
                    f"cloud.region: no subnet of {vpc} in {self.region} has internet access (an internet gateway and "
                    "public addresses, or a NAT gateway), so machines could not fetch their image; add one, or deploy "
                    "infra/aws with Network=true"
                )
            image = ami or self.ssm.get_parameter(Name=AMI_PARAMETERS[gpu])["Parameter"]["Value"]
            if not self.ec2.describe_images(Filters=[{"Name": "image-id", "Values": [image]}])["Images"]:
                raise JobError(
                    f"cloud.ami: there is no machine image {image} in {self.region}; name one or leave it out"
                )
        return LaunchSite(self.region, vpc, subnets, image)

    def regions(self) -> list[str]:
        """Return the names of the regions that the account may use, sorted."""
        with explained():
            return sorted(region["RegionName"] for region in self.ec2.describe_regions()["Regions"])

    def zones_of(self, type_: str) -> set[str]:
        """Return the zones that offer an instance type."""
        with explained():
            answer = self.ec2.describe_instance_type_offerings(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [type_]}]
            )
        return {item["Location"] for item in answer["InstanceTypeOfferings"]}

    def spot_prices(self, types: Collection[str]) -> dict[tuple[str, str], float]:
        """Return the current spot prices of these types, USD an hour by type and zone."""
        with explained():
            return pricing.spot_prices_of(self.ec2, types)

    def instances(self, run: str | None = None, states: Collection[str] = ALIVE_STATES) -> list[Instance]:
        """List the machines of a run, or of all runs, by tag."""
        filters = [{"Name": "instance-state-name", "Values": list(states)}]
        filters.append(
            {"Name": f"tag:{TAG}run", "Values": [run]} if run else {"Name": "tag-key", "Values": [f"{TAG}run"]}
        )
        with explained():
            pages = self.ec2.get_paginator("describe_instances").paginate(Filters=filters)
            return [_instance(item) for page in pages for group in page["Reservations"] for item in group["Instances"]]

    def remnants(self, run: str | None = None) -> list[LeftoverResource]:
        """List all resources but machines that are tagged with a run, or with any run."""
        key = [{"Name": f"tag:{TAG}run", "Values": [run]} if run else {"Name": "tag-key", "Values": [f"{TAG}run"]}]
        with explained():
            groups = self.ec2.describe_security_groups(Filters=key)["SecurityGroups"]
            templates = self.ec2.describe_launch_templates(Filters=key)["LaunchTemplates"]
            path = f"/idletrain/{run}/" if run else "/idletrain/"
            pages = self.ssm.get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
            names = [parameter["Name"] for page in pages for parameter in page["Parameters"]]
            return [
                *(LeftoverResource("group", group["GroupId"], _tags(group)) for group in groups),
                *(LeftoverResource("template", item["LaunchTemplateId"], _tags(item)) for item in templates),
                *(LeftoverResource("parameter", name, self._parameter_tags(name)) for name in names),
            ]

    def _parameter_tags(self, name: str) -> dict[str, str]:
        tags: list[dict[str, str]] = []
        with _unless(("InvalidResourceId",)):  # another teardown was quicker
            tags = self.ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
        return {tag["Key"]: tag["Value"] for tag in tags}

    # --- creation -----------------------------------------------------------------------------------------------

    def make_group(self, run: str, vpc: str, tags: Mapping[str, str]) -> str:
        """Create a run's security group, unless it exists; return its id."""
        with explained():
            try:
                group: str = self.ec2.create_security_group(**requests.security_group(run, vpc, tags))["GroupId"]
            except ClientError as error:
                if _code(error) != "InvalidGroup.Duplicate":
                    raise
                group = next(remnant.id for remnant in self.remnants(run) if remnant.kind == "group")
            try:
                self.ec2.authorize_security_group_ingress(**requests.ingress(group))
            except ClientError as error:
                if _code(error) != "InvalidPermission.Duplicate":
                    raise
        return group

    def put_identities(self, run: str, identities: Mapping[str, Identity], tags: Mapping[str, str]) -> None:
        """Store a run's certificates, by role, as parameters that only its machines may read."""
        with explained():
            for role, identity in identities.items():
                name = _parameter(run, role)
                self.ssm.put_parameter(  # tags are accepted at creation only, so an old one is not overwritten
                    Name=name, Value=identity.as_json(), Type="SecureString", Tags=requests.tag_list(tags)
                )

    def identity(self, run: str, role: str) -> Identity:
        """Read the certificates of a role (`head` or `worker`) of a run."""
        with explained():
            answer = self.ssm.get_parameter(Name=_parameter(run, role), WithDecryption=True)
        return Identity.from_json(answer["Parameter"]["Value"])

    def make_template(self, body: Mapping[str, Any]) -> str:
        """Create a launch template; return its id."""
        with explained():
            template: str = self.ec2.create_launch_template(**body)["LaunchTemplate"]["LaunchTemplateId"]
        return template

    def start_head(self, bodies: Sequence[Mapping[str, Any]]) -> str:
        """Start a run's head node by the first request with capacity; return its id. Repeating starts no second one.

        Raises:
            RunError: no request has capacity, or the cloud refuses.
        """
        for body in bodies:
            try:
                with explained(unless=requests.CAPACITY_ERRORS):
                    instance: str = self._launcher.run_instances(**body)["Instances"][0]["InstanceId"]
                    return instance
            except ClientError as error:
                logger.info("no %s in %s: %s", body["InstanceType"], body["SubnetId"], _code(error))
        raise RunError(
            f"cloud.head: no zone of {self.region} has capacity for a {bodies[0]['InstanceType']} now; "
            "name another type, or try again in a while"
        )

    def start_nodes(self, site: LaunchSite, body: Mapping[str, Any], pools: Collection[Pool]) -> LaunchOutcome:
        """Start nodes, as many as there is capacity for; the outcome says what is missing and why."""
        market = next(iter(pools)).market
        try:
            answer = self._launcher.create_fleet(**body)
        except ClientError as error:
            return requests.outcome_of_error(_code(error), str(error), frozenset(pools))
        except ResponseParserError as error:
            return LaunchOutcome(fatal=_first_line(error))
        except BotoCoreError:  # no answer: the request may have succeeded; repeating it with its token is safe
            return LaunchOutcome(retry=True)
        return requests.outcome_of_fleet(answer, market, {subnet: zone for zone, subnet in site.subnets.items()})

    # --- deletion and changes -----------------------------------------------------------------------------------

    def terminate(self, ids: Collection[str]) -> None:
        """Terminate machines; ids that are gone, or not yet visible, are no error (callers list them again by tag)."""
        if not ids:
            return
        with explained():
            try:
                self.ec2.terminate_instances(InstanceIds=list(ids))
            except ClientError:
                for id_ in ids:  # a single unknown id makes AWS refuse them all
                    with _unless(NOT_FOUND_CODES):
                        self.ec2.terminate_instances(InstanceIds=[id_])

    def _delete_group(self, group: str) -> None:
        """Delete a security group as soon as no machine uses it."""
        deadline = time.monotonic() + RELEASE_SECONDS
        with explained():
            while True:
                try:
                    with _unless(NOT_FOUND_CODES):
                        self.ec2.delete_security_group(GroupId=group)
                    return
                except ClientError as error:
                    if _code(error) != "DependencyViolation" or time.monotonic() > deadline:
                        raise
                time.sleep(RELEASE_PAUSE_SECONDS)

    def delete(self, remnant: LeftoverResource) -> None:
        """Delete a resource that is not a machine."""
        if remnant.kind == "group":
            self._delete_group(remnant.id)
        elif remnant.kind == "template":
            with explained(), _unless((*NOT_FOUND_CODES, "MissingParameter")):
                self.ec2.delete_launch_template(LaunchTemplateId=remnant.id)
        else:
            with explained(), _unless(("ParameterNotFound",)):
                self.ssm.delete_parameter(Name=remnant.id)

    def leave_group(self, instance: str) -> None:
        """Move a machine to its VPC's default group, so that its run's group can be deleted before it ends."""
        with explained():
            description = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
            filters = [
                {"Name": "vpc-id", "Values": [description["VpcId"]]},
                {"Name": "group-name", "Values": ["default"]},
            ]
            default = self.ec2.describe_security_groups(Filters=filters)["SecurityGroups"][0]["GroupId"]
            self.ec2.modify_instance_attribute(InstanceId=instance, Groups=[default])

    def tag(self, ids: Collection[str], tags: Mapping[str, str]) -> None:
        """Set tags on machines, which read them from their metadata."""
        with explained():
            self.ec2.create_tags(Resources=list(ids), Tags=requests.tag_list(tags))


@contextlib.contextmanager
def _unless(codes: Collection[str]) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if _code(error) not in codes:
            raise


def _first_line(error: ResponseParserError) -> str:
    """Return botocore's message about an answer, without the answer itself, which may be a page."""
    return str(error).partition("\n")[0].partition(", invalid XML")[0][:200]


def _code(error: ClientError) -> str:
    code: str = error.response["Error"]["Code"]
    return code


def _parameter(run: str, role: str) -> str:
    return f"/idletrain/{run}/{role}/tls"


def _tags(item: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}


def _instance(item: Mapping[str, Any]) -> Instance:
    market = "spot" if item.get("InstanceLifecycle") == "spot" else "on-demand"
    return Instance(
        id=item["InstanceId"],
        state=item["State"]["Name"],
        pool=Pool(market, item["InstanceType"], item["Placement"]["AvailabilityZone"]),
        launched_at=item["LaunchTime"].timestamp(),
        address=item.get("PrivateIpAddress", ""),
        tags=_tags(item),
        reason=item.get("StateReason", {}).get("Code", ""),
    )
