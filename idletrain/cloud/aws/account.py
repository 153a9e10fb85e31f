"""Call AWS: thin, blocking calls that are safe to repeat. `requests` builds their bodies and reads their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from idletrain.cloud.aws import network_routes, pricing, quotas, requests, run_resources, spot_advisor
from idletrain.cloud.aws.clients import Clients
from idletrain.cloud.aws.errors import REQUEST_ERRORS, code_of, explained, ignoring, required
from idletrain.cloud.aws.iam import DATA_PREFIX, ENDED_HEADS_TAG
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.instance_types import Offer
from idletrain.cloud.machines import (
    ALIVE_STATES,
    TAG,
    Instance,
    LaunchOutcome,
    LaunchSite,
    LeftoverResource,
    NodeRequest,
    Pool,
)
from idletrain.cloud.market import MarketSnapshot
from idletrain.cloud.record import RunRecord
from idletrain.cluster.identity import Identity
from idletrain.errors import JobError, RunError

AMI_PARAMETERS = {
    False: "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id",
    True: "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
}
RELEASE_SECONDS = (
    300.0  # a group can be deleted once no interface uses it: minutes after its machines began to terminate
)
RELEASE_PAUSE_SECONDS = 1.0
NOT_FOUND_CODES = ("InvalidInstanceID.NotFound", "InvalidGroup.NotFound", "InvalidLaunchTemplateId.NotFound")


class Account(Clients):
    """An AWS account in one region; see `idletrain.cloud.account.CloudAccount`."""

    def console(self, instance: str) -> str:
        """Return the console output of a machine, as far as the cloud has kept it."""
        with explained():
            output: str = self.ec2.get_console_output(InstanceId=instance).get("Output", "")
            return output

    # --- descriptions -------------------------------------------------------------------------------------------

    def explained(self) -> AbstractContextManager[None]:
        """Turn AWS' errors within the context into sentences."""
        return explained()

    def market(self, cache: Path) -> MarketSnapshot:
        """Return the types, zones and prices of the region."""
        with explained():
            price_list = self.client("pricing", pricing.PRICING_REGION)
            return pricing.fetch(self.ec2, price_list, pricing.PriceCache(cache))

    def interruptions(self, cache: Path) -> dict[str, float]:
        """Return the share of each type's spot machines that AWS takes back in a month; nothing of another cloud."""
        return spot_advisor.shares(self.ec2, pricing.PriceCache(cache))

    def quota_fault(self, nodes: int, offers: Collection[Offer]) -> str | None:
        """Return why the account's quotas allow a fleet of none of these offers, or None."""
        return quotas.quota_fault(self, nodes, offers)

    def readable_data(self) -> tuple[str, ...]:
        """Return the S3 prefixes of data that the roles of infra/aws may read."""
        return tuple(f"s3://{self.bucket}/{folder}/" for folder in (DATA_PREFIX, "runs"))

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
            return [
                _instance(item)
                for page in pages
                for group in required(page, "Reservations")
                for item in group["Instances"]
            ]

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
        with ignoring(("InvalidResourceId",)):  # another teardown was quicker
            tags = self.ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
        return {tag["Key"]: tag["Value"] for tag in tags}

    # --- creation -----------------------------------------------------------------------------------------------

    def prepare_run(
        self,
        run: RunRecord,
        image: str,
        identities: Mapping[str, Identity],
        report: Callable[[str], None],
        reached: Callable[[str], None],
    ) -> LaunchSite:
        """Create what a run's machines need; return their place."""
        return run_resources.prepare_site(self, run, image, identities, Patience(report), reached)

    def start_head(self, run: RunRecord, image: str, report: Callable[[str], None]) -> str:
        """Start a run's head node; return its id. Repeating starts no second one."""
        return run_resources.start_head(self, run, image, Patience(report))

    def start_nodes(self, site: LaunchSite, request: NodeRequest) -> LaunchOutcome:
        """Start nodes, as many as there is capacity for; the outcome says what is missing and why."""
        try:
            answer = self.launcher.create_fleet(**requests.fleet(site, request))
            required(answer, "FleetId")
            zones = {subnet: zone for zone, subnet in site.subnets.items()}
            return requests.outcome_of_fleet(answer, request.pools, zones)
        except REQUEST_ERRORS as error:
            return requests.outcome_of_error(error, request.pools)

    def identity(self, run: str, role: str) -> Identity:
        """Read the certificates of a role (`head` or `worker`) of a run."""
        with explained():
            answer = self.ssm.get_parameter(Name=run_resources.parameter_name(run, role), WithDecryption=True)
            return Identity.from_json(answer["Parameter"]["Value"])

    def dashboard_token(self, run: str) -> str:
        """Return the token that a running run's dashboard asks for.

        Raises:
            RunError: the run has no secrets any more, or this account may not read them.
        """
        path, _, name = run_resources.parameter_name(run, "head").rpartition("/")
        with explained():
            pages = self.ssm.get_paginator("get_parameters_by_path").paginate(Path=path, WithDecryption=True)
            for parameter in (parameter for page in pages for parameter in page["Parameters"]):
                if parameter["Name"] == f"{path}/{name}":
                    return Identity.from_json(parameter["Value"]).dashboard_token
        raise RunError(f"run {run} has no secrets any more: it has ended; see `idletrain status {run}`")

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
                    with ignoring(NOT_FOUND_CODES):
                        self.ec2.terminate_instances(InstanceIds=[id_])

    def _delete_group(self, group: str) -> None:
        """Delete a security group as soon as no machine uses it."""
        deadline = time.monotonic() + RELEASE_SECONDS
        with explained():
            while True:
                try:
                    with ignoring(NOT_FOUND_CODES):
                        self.ec2.delete_security_group(GroupId=group)
                    return
                except ClientError as error:
                    if code_of(error) != "DependencyViolation" or time.monotonic() > deadline:
                        raise
                time.sleep(RELEASE_PAUSE_SECONDS)

    def delete(self, remnant: LeftoverResource) -> None:
        """Delete a resource that is not a machine."""
        if remnant.kind == "group":
            self._delete_group(remnant.id)
        elif remnant.kind == "template":
            with explained(), ignoring((*NOT_FOUND_CODES, "MissingParameter")):
                self.ec2.delete_launch_template(LaunchTemplateId=remnant.id)
        else:
            with explained(), ignoring(("ParameterNotFound",)):
                self.ssm.delete_parameter(Name=remnant.id)

    def leave_group(self, instance: str) -> None:
        """Move a machine to the group of infra/aws for heads that end, so that its run's group can be deleted.

        Raises:
            RunError: the network has no such group.
        """
        with explained():
            description = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
            group = self.ended_heads_group(description["VpcId"])
            self.ec2.modify_instance_attribute(InstanceId=instance, Groups=[group])

    def ended_heads_group(self, vpc: str) -> str:
        """Return the id of the group of infra/aws for heads that end.

        Raises:
            RunError: the network has none.
        """
        filters = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "tag-key", "Values": [ENDED_HEADS_TAG]}]
        with explained():
            groups = self.ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        if not groups:
            raise RunError(f"{vpc} has no group for heads that end; deploy infra/aws again, which makes it")
        group: str = groups[0]["GroupId"]
        return group

    def tag(self, ids: Collection[str], tags: Mapping[str, str]) -> None:
        """Set tags on machines, which read them from their metadata."""
        with explained():
            self.ec2.create_tags(Resources=list(ids), Tags=requests.tag_list(tags))


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
