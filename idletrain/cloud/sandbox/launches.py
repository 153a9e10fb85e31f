"""Carry out RunInstances and CreateFleet, and refuse requests that AWS would refuse. Knows nothing of HTTP."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moto.core.exceptions import ServiceException
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ec2.utils import filter_iam_instance_profiles, random_fleet_id

from idletrain.cloud.sandbox import prices
from idletrain.cloud.sandbox.capacity import INSUFFICIENT, CapacityOffer, CapacityPool, grant_capacity
from idletrain.cloud.sandbox.instances import ACCOUNT_ID, Instances, NoAddressError
from idletrain.cloud.sandbox.launch_spec import (
    MAX_USER_DATA_BYTES,
    LaunchSpec,
    RequestData,
    Tags,
    launch_spec,
    overlaid,
    tags_of,
)
from idletrain.cloud.sandbox.metadata import iso

MESSAGES = {
    INSUFFICIENT: "We currently do not have sufficient {0.type} capacity in the Availability Zone you requested "
    "({0.zone}).",
    "SpotMaxPriceTooLow": "Your Spot request price is lower than the minimum required Spot request fulfillment price.",
    "Unsupported": "Your requested instance type ({0.type}) is not supported in your requested Availability Zone "
    "({0.zone}).",
}
LaunchChoice = tuple[RequestData, LaunchSpec, str]
"""An override as in the answer, the specification that it launches, and the subnet."""


class NoCapacityError(Exception):
    """There is no capacity for RunInstances; AWS reports that as a server error, status 500."""


class Launcher:
    """Launches the instances of one request.

    Args:
        instances: The account's instances.
        backend: moto's EC2 of the request's region.
    """

    def __init__(self, instances: Instances, backend: Any) -> None:
        self._instances, self._backend = instances, backend

    def run(self, params: RequestData) -> Any:
        """Launch between `MinCount` and `MaxCount` instances of one pool (RunInstances); return moto's reservation.

        Raises:
            NoCapacityError: no pool has `MinCount`.
        """
        spec = launch_spec(self._template(params.get("LaunchTemplate") or {})[1], params)
        self._check(spec)
        offer = None
        for subnet in self._subnets(spec):
            offer = self._offer(spec, subnet)
            granted = grant_capacity(
                int(params["MaxCount"]), [offer], self._instances.limits, self._instances.pools(), spread=False
            )
            if granted.counts[0] >= int(params["MinCount"]):
                return self._launch(spec, subnet, granted.counts[0], params.get("ClientToken"))
        assert offer
        message = MESSAGES[offer.fault or INSUFFICIENT].format(offer.pool)
        if offer.fault:
            raise EC2ClientError(offer.fault, message)
        raise NoCapacityError(message)

    def fleet(self, params: RequestData) -> dict[str, Any]:
        """Launch a fleet (CreateFleet); return its answer, which may contain both instances and errors."""
        if params.get("Type") != "instant":
            raise EC2ClientError("UnsupportedOperation", "The rehearsal cloud has fleets of type instant only")
        tags = tags_of(params.get("TagSpecifications"))
        id_ = random_fleet_id()
        target = params["TargetCapacitySpecification"]
        instances: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        shares = [(market, count, list(self._choices(params, market, tags))) for market, count in _markets(target)]
        for market, count, choices in shares:
            self._fill(id_, market, count, params, choices, instances, errors)
        self._instances.fleets[id_] = {
            "FleetId": id_,
            "FleetState": "active",
            "Type": "instant",
            "CreateTime": iso(time.time()),
            "ClientToken": params.get("ClientToken"),
            "TargetCapacitySpecification": target,
            "LaunchTemplateConfigs": params["LaunchTemplateConfigs"],
            "FulfilledCapacity": float(sum(len(item["InstanceIds"]) for item in instances)),
            "Tags": [{"Key": key, "Value": value} for key, value in tags.get("fleet", {}).items()],
            "region": self._backend.region_name,
        }
        return {"FleetId": id_, "Instances": instances, "Errors": errors}

    def _choices(self, params: RequestData, market: str, tags: Tags) -> Iterable[LaunchChoice]:
        """Yield every override of a fleet, in every subnet that it allows."""
        for config in params["LaunchTemplateConfigs"]:
            specification, data = self._template(config["LaunchTemplateSpecification"])
            for override in config.get("Overrides") or [{}]:
                if "WeightedCapacity" in override or "InstanceRequirements" in override:
                    raise EC2ClientError("UnsupportedOperation", "The rehearsal cloud counts instances of named types")
                spec = launch_spec(data, override, market)
                spec = replace(spec, tags=overlaid(spec.tags, tags))
                self._check(spec)
                described = {"LaunchTemplateSpecification": specification, "Overrides": override}
                for subnet in self._subnets(spec):
                    yield described, spec, subnet

    def _fill(
        self,
        fleet: str,
        market: str,
        count: int,
        params: RequestData,
        choices: Sequence[LaunchChoice],
        instances: list[dict[str, Any]],
        errors: list[dict[str, Any]],
    ) -> None:
        """Launch a fleet's instances of one market; append them and their errors to the lists."""
        options = params.get("SpotOptions" if market == "spot" else "OnDemandOptions") or {}
        spread = options.get("AllocationStrategy", "lowest-price") not in ("lowest-price", "lowestPrice")
        offers = [self._offer(spec, subnet) for _, spec, subnet in choices]
        granted = grant_capacity(count, offers, self._instances.limits, self._instances.pools(), spread=spread)
        for (described, spec, subnet), launched in zip(choices, granted.counts, strict=True):
            if launched:
                tags = overlaid(spec.tags, {"instance": {"aws:ec2:fleet-id": fleet}})
                reservation = self._launch(replace(spec, tags=tags), subnet, launched, params.get("ClientToken"))
                ids = [instance.id for instance in reservation.instances]
                item = {"InstanceIds": ids, "InstanceType": spec.type, "Lifecycle": market}
                instances.append({**item, "LaunchTemplateAndOverrides": described})
        for n, code in granted.errors:
            error = {"ErrorCode": code, "ErrorMessage": MESSAGES[code].format(offers[n].pool)}
            errors.append({**error, "LaunchTemplateAndOverrides": choices[n][0], "Lifecycle": market})

    def _launch(self, spec: LaunchSpec, subnet: str, count: int, token: str | None) -> Any:
        try:
            return self._instances.launch(self._backend, spec, subnet, count, token)
        except NoAddressError:
            message = f"There are not enough free addresses in subnet {subnet}"
            raise EC2ClientError("InsufficientFreeAddressesInSubnet", message) from None

    def _offer(self, spec: LaunchSpec, subnet: str) -> CapacityOffer:
        zone = self._backend.get_subnet(subnet).availability_zone
        pool = CapacityPool(spec.market, spec.type, zone)
        machine = prices.hardware(INSTANCE_TYPES[spec.type])
        spot = prices.spot_usd_per_hour(machine, zone)
        price = spot if spec.market == "spot" else prices.on_demand_usd_per_hour(machine)
        if (spec.type, zone) not in offered_types(self._backend.region_name):
            return CapacityOffer(pool, price, "Unsupported")
        capped = spec.max_usd_per_hour is not None and spec.market == "spot" and spec.max_usd_per_hour < spot
        return CapacityOffer(pool, price, "SpotMaxPriceTooLow" if capped else "")

    def _subnets(self, spec: LaunchSpec) -> list[str]:
        """Return the ids of the subnets that a launch may use."""
        if spec.subnet:
            return [self._backend.get_subnet(spec.subnet).id]
        default = self._backend.get_default_subnets()
        subnets = [default[zone].id for zone in sorted(default) if spec.zone in ("", zone)]
        if not subnets:
            raise EC2ClientError("InvalidParameterValue", f"Invalid availability zone: [{spec.zone}]")
        return subnets

    def _template(self, requested: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return a launch template as an answer names it, and its data."""
        if not requested:
            return {}, {}
        name, id_ = requested.get("LaunchTemplateName"), requested.get("LaunchTemplateId")
        backend = self._backend
        template = backend.get_launch_template(id_) if id_ else backend.get_launch_template_by_name(name)
        version = template.get_version(requested.get("Version") or "$Default")
        return {"LaunchTemplateId": template.id, "Version": str(version.number)}, version.data

    def _check(self, spec: LaunchSpec) -> None:
        """Refuse a launch that AWS would refuse before it searches for capacity."""
        backend = self._backend
        if spec.type not in INSTANCE_TYPES:
            raise EC2ClientError("InvalidParameterValue", f"Invalid value '{spec.type}' for InstanceType.")
        if not spec.image:
            raise EC2ClientError("MissingParameter", "The request must contain the parameter ImageId")
        backend.describe_images(ami_ids=[spec.image])
        for group in spec.groups:
            if backend.get_security_group_from_id(group) is None:
                raise EC2ClientError("InvalidGroup.NotFound", f"The security group '{group}' does not exist")
        if spec.profile:
            try:
                filter_iam_instance_profiles(
                    ACCOUNT_ID, backend.partition, spec.profile.get("Arn"), spec.profile.get("Name")
                )
            except ServiceException as error:
                message = f"Invalid IAM Instance Profile: {error.message}"
                raise EC2ClientError("InvalidParameterValue", message) from None
        refuse_long(spec)


@functools.cache
def offered_types(region: str) -> Mapping[tuple[str, str], prices.Hardware]:
    """Return the hardware that a region's zones offer, by type and zone."""
    items = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ())
    pairs = [(item["InstanceType"], item["Location"]) for item in items if item["InstanceType"] in INSTANCE_TYPES]
    return {(name, zone): prices.hardware(INSTANCE_TYPES[name]) for name, zone in pairs}


def refuse_long(spec: LaunchSpec) -> None:
    """Refuse user data that is too long for AWS."""
    if len(spec.program) > MAX_USER_DATA_BYTES:
        raise EC2ClientError("InvalidParameterValue", f"User data is limited to {MAX_USER_DATA_BYTES} bytes")


def _markets(target: RequestData) -> list[tuple[str, int]]:
    """Return the number of requested instances of each market."""
    wanted = {
        "on-demand": int(target.get("OnDemandTargetCapacity") or 0),
        "spot": int(target.get("SpotTargetCapacity") or 0),
    }
    rest = int(target["TotalTargetCapacity"]) - sum(wanted.values())
    wanted[target.get("DefaultTargetCapacityType") or "on-demand"] += max(0, rest)
    return [(market, count) for market, count in wanted.items() if count]
