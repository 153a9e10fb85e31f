"""The calls to AWS that runs need: thin, safe to repeat, blocking. Bodies and meanings are in `requests`.

A second EC2 client never retries: botocore takes a lack of capacity for a server error and would ask four times.
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
RELEASE_SECONDS = 300.0  # a group can be deleted once no interface uses it: minutes after its machines' end began
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
        """The run that it belongs to."""
        return self.tags[TAG + "run"]

    @property
    def head_session(self) -> str:
        """When its sitting of the run began, by the launcher's clock, as its tags tell."""
        return self.tags.get(TAG + "created", "")

    @property
    def role(self) -> str:
        """`head` or `worker`."""
        return self.tags.get(TAG + "role", "")


@dataclass(frozen=True)
class LeftoverResource:
    """Something of a run that is not a machine."""

    kind: Literal["group", "template", "parameter"]
    id: str
    tags: Mapping[str, str]


@contextlib.contextmanager
def explained(unless: Collection[str] = ()) -> Iterator[None]:
    """Turn what AWS refuses into one sentence; what is not known here keeps AWS' own words.

    Args:
        unless: Codes that the caller knows what to do about.

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
        code, words = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
        raise RunError(f"AWS refuses {error.operation_name}: {code}: {words}; `idletrain doctor` may say why") from None
    except BotoCoreError as error:
        raise RunError(f"AWS cannot be asked: {error}; check the network and `idletrain doctor`") from None
    except ResponseParserError as error:
        raise RunError(f"AWS is not what answers: {_first_words(error)}; check the network and proxies") from None


class Account:
    """An account in one region.

    Args:
        region: The region; AWS' own configuration says which when None.
    """

    def __init__(self, region: str | None = None) -> None:
        with explained():
            self._session = boto3.Session(region_name=region)
            if not self._session.region_name:
                raise NoRegionError
        self.region: str = self._session.region_name

    # Made when first asked for: a node needs two of them, and each takes a tenth of a second.

    @functools.cached_property
    def ec2(self) -> Any:
        """EC2, asked again where that may help."""
        return self.client("ec2")

    @functools.cached_property
    def _launcher(self) -> Any:
        return self.client("ec2", attempts=1)

    @functools.cached_property
    def ssm(self) -> Any:
        """The parameter store."""
        return self.client("ssm")

    @functools.cached_property
    def s3(self) -> Any:
        """S3."""
        return self.client("s3")

    def client(self, service: str, region: str | None = None, attempts: int = 10) -> Any:
        """A client of a service."""
        config = Config(retries={"mode": "standard", "total_max_attempts": attempts})
        with explained():
            return self._session.client(service, region_name=region or self.region, config=config)

    @functools.cached_property
    def owner(self) -> str:
        """Who we are, as an ARN."""
        with explained():
            arn: str = self.client("sts").get_caller_identity()["Arn"]
            return arn

    @property
    def number(self) -> str:
        """The account's number."""
        return str(self.owner).split(":")[4]

    @property
    def bucket(self) -> str:
        """The bucket that infra/aws makes for it in this region."""
        return f"idletrain-{self.number}-{self.region}"

    def console(self, instance: str) -> str:
        """What a machine has printed, as far as the cloud has kept it."""
        with explained():
            output: str = self.ec2.get_console_output(InstanceId=instance).get("Output", "")
            return output

    # --- what is there ------------------------------------------------------------------------------------------

    def site(self, ami: str | None, gpu: bool) -> LaunchSite:
        """The network, ours from infra/aws before the region's default one, and the machine image.

        Raises:
            JobError: there is none, or machines in it would be cut off.
        """
        with explained():
            own = self.ec2.describe_vpcs(Filters=[{"Name": "tag-key", "Values": [f"{TAG}network"]}])["Vpcs"]
            given = self.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
            if not own + given:
                raise JobError(f"cloud.region: {self.region} has no default VPC; deploy infra/aws with Network=true")
            vpc = (own + given)[0]["VpcId"]
            within = [{"Name": "vpc-id", "Values": [vpc]}]
            subnets = network_routes.subnets_with_internet(
                self.ec2.describe_subnets(Filters=within)["Subnets"],
                self.ec2.describe_route_tables(Filters=within)["RouteTables"],
            )
            if not subnets:
                raise JobError(
                    f"cloud.region: no subnet of {vpc} in {self.region} has a way out (an internet gateway and public "
                    "addresses, or a NAT gateway), so machines could not fetch their image; add one, or deploy "
                    "infra/aws with Network=true"
                )
            image = ami or self.ssm.get_parameter(Name=AMI_PARAMETERS[gpu])["Parameter"]["Value"]
            if not self.ec2.describe_images(Filters=[{"Name": "image-id", "Values": [image]}])["Images"]:
                raise JobError(
                    f"cloud.ami: there is no machine image {image} in {self.region}; name one or leave it out"
                )
        return LaunchSite(self.region, vpc, subnets, image)

    def regions(self) -> list[str]:
        """The regions that are open to the account, in order."""
        with explained():
            return sorted(region["RegionName"] for region in self.ec2.describe_regions()["Regions"])

    def zones_of(self, type_: str) -> set[str]:
        """The zones that offer an instance type."""
        with explained():
            found = self.ec2.describe_instance_type_offerings(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [type_]}]
            )
        return {item["Location"] for item in found["InstanceTypeOfferings"]}

    def spot_prices(self, types: Collection[str]) -> dict[tuple[str, str], float]:
        """What spot machines of these types cost now, USD an hour by type and zone."""
        with explained():
            return pricing.spot_prices_of(self.ec2, types)

    def instances(self, run: str | None = None, states: Collection[str] = ALIVE_STATES) -> list[Instance]:
        """Machines of a run, or of all runs, by tag."""
        wanted = [{"Name": "instance-state-name", "Values": list(states)}]
        wanted.append(
            {"Name": f"tag:{TAG}run", "Values": [run]} if run else {"Name": "tag-key", "Values": [f"{TAG}run"]}
        )
        with explained():
            pages = self.ec2.get_paginator("describe_instances").paginate(Filters=wanted)
            return [_instance(item) for page in pages for group in page["Reservations"] for item in group["Instances"]]

    def remnants(self, run: str | None = None) -> list[LeftoverResource]:
        """Everything but machines that is tagged with a run, or with any."""
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
        found: list[dict[str, str]] = []
        with _unless(("InvalidResourceId",)):  # another teardown was quicker
            found = self.ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
        return {tag["Key"]: tag["Value"] for tag in found}

    # --- what a run makes ---------------------------------------------------------------------------------------

    def make_group(self, run: str, vpc: str, tags: Mapping[str, str]) -> str:
        """The run's security group; made once, however often asked."""
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
        """Lay a run's certificates where its machines, and nobody else, may read them."""
        with explained():
            for role, identity in identities.items():
                name = _parameter(run, role)
                self.ssm.put_parameter(  # tags go with the making alone, so an old one is not overwritten
                    Name=name, Value=identity.as_json(), Type="SecureString", Tags=requests.tag_list(tags)
                )

    def identity(self, run: str, role: str) -> Identity:
        """A role's certificates, on one of the run's machines."""
        with explained():
            found = self.ssm.get_parameter(Name=_parameter(run, role), WithDecryption=True)
        return Identity.from_json(found["Parameter"]["Value"])

    def make_template(self, body: Mapping[str, Any]) -> str:
        """The run's launch template."""
        with explained():
            template: str = self.ec2.create_launch_template(**body)["LaunchTemplate"]["LaunchTemplateId"]
        return template

    def start_head(self, bodies: Sequence[Mapping[str, Any]]) -> str:
        """The run's head, by the first request that there is capacity for; the same ones never start a second.

        Raises:
            RunError: there is none for any, or the cloud refuses.
        """
        for body in bodies:
            try:
                with explained(unless=requests.CAPACITY_ERRORS):
                    instance: str = self._launcher.run_instances(**body)["Instances"][0]["InstanceId"]
                    return instance
            except ClientError as error:
                logger.info("no %s in %s: %s", body["InstanceType"], body["SubnetId"], _code(error))
        raise RunError(
            f"cloud.head: no zone of {self.region} has a {bodies[0]['InstanceType']} to spare now; "
            "name another type, or try again in a while"
        )

    def start_nodes(self, site: LaunchSite, body: Mapping[str, Any], pools: Collection[Pool]) -> LaunchOutcome:
        """Nodes, as many as there are; what is missing is in the outcome."""
        market = next(iter(pools)).market
        try:
            answer = self._launcher.create_fleet(**body)
        except ClientError as error:
            return requests.outcome_of_error(_code(error), str(error), frozenset(pools))
        except ResponseParserError as error:
            return LaunchOutcome(fatal=_first_words(error))
        except BotoCoreError:  # no answer: the request may have been carried out; its token says so if repeated
            return LaunchOutcome(retry=True)
        return requests.outcome_of_fleet(answer, market, {subnet: zone for zone, subnet in site.subnets.items()})

    # --- what a run leaves --------------------------------------------------------------------------------------

    def terminate(self, ids: Collection[str]) -> None:
        """End machines; those that are gone, or not yet visible, are no error (they are looked for again by tag)."""
        if not ids:
            return
        with explained():
            try:
                self.ec2.terminate_instances(InstanceIds=list(ids))
            except ClientError:
                for id_ in ids:  # a single unknown id refuses them all
                    with _unless(NOT_FOUND_CODES):
                        self.ec2.terminate_instances(InstanceIds=[id_])

    def _delete_group(self, group: str) -> None:
        """Delete a security group as soon as its machines let go of it."""
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
        """Delete what is not a machine."""
        if remnant.kind == "group":
            self._delete_group(remnant.id)
        elif remnant.kind == "template":
            with explained(), _unless((*NOT_FOUND_CODES, "MissingParameter")):
                self.ec2.delete_launch_template(LaunchTemplateId=remnant.id)
        else:
            with explained(), _unless(("ParameterNotFound",)):
                self.ssm.delete_parameter(Name=remnant.id)

    def leave_group(self, instance: str) -> None:
        """Put a machine into its VPC's default group, so that its run's group can be deleted before it ends."""
        with explained():
            found = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
            same = [{"Name": "vpc-id", "Values": [found["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
            default = self.ec2.describe_security_groups(Filters=same)["SecurityGroups"][0]["GroupId"]
            self.ec2.modify_instance_attribute(InstanceId=instance, Groups=[default])

    def tag(self, ids: Collection[str], tags: Mapping[str, str]) -> None:
        """Set tags on machines; they read them from their metadata."""
        with explained():
            self.ec2.create_tags(Resources=list(ids), Tags=requests.tag_list(tags))


@contextlib.contextmanager
def _unless(codes: Collection[str]) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if _code(error) not in codes:
            raise


def _first_words(error: ResponseParserError) -> str:
    """What botocore says of an answer, without the answer, which may be a page."""
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
