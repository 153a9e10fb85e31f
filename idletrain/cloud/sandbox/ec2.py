"""Answer EC2's actions as AWS does, where moto differs from it; moto does the rest."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moto.core.request import Request
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.responses import EC2Response
from moto.ec2.utils import parse_user_data

from idletrain.cloud.sandbox import prices
from idletrain.cloud.sandbox.fast_xml import FastXmlResult
from idletrain.cloud.sandbox.instances import TERMINATED, Instances
from idletrain.cloud.sandbox.launch_spec import launch_spec
from idletrain.cloud.sandbox.launches import Launcher, offered_types, refuse_long
from idletrain.cloud.sandbox.metadata import iso

PRICE_PAGE = 1000  # rows of DescribeSpotPriceHistory at a time, on AWS too
LINUX = "Linux/UNIX"
CONSOLE_BYTES = 65536  # GetConsoleOutput gives the last 64 KB


class RehearsedEC2(EC2Response):
    """moto's handler of one request; actions that idletrain's safety depends on behave as on AWS.

    Args:
        instances: The account's instances.
        logs: Directory of the machines' output.
    """

    def __init__(self, instances: Instances, logs: Path) -> None:
        super().__init__()
        self._instances, self._logs = instances, logs

    def answer(self, request: Request) -> tuple[int, Mapping[str, str], str | bytes]:
        """Answer a request; return status, headers and body."""
        status, headers, body = self._dispatch(request)
        return status, headers, body

    def create_launch_template(self) -> ActionResult:
        refuse_long(launch_spec({}, {"UserData": parse_user_data(self._get_param("LaunchTemplateData.UserData"))}))
        return super().create_launch_template()

    def run_instances(self) -> ActionResult:
        self.error_on_dryrun()
        params = {**self._get_params(), "UserData": parse_user_data(self._get_param("UserData"))}
        return ActionResult(Launcher(self._instances, self.ec2_backend).run(params))

    def create_fleet(self) -> ActionResult:
        self.error_on_dryrun()
        return ActionResult(Launcher(self._instances, self.ec2_backend).fleet(self._get_params()))

    def terminate_instances(self) -> ActionResult:
        instances = self.ec2_backend.get_multi_instances_by_id(self._get_param("InstanceIds", []))
        self.error_on_dryrun()
        changes = []
        for instance in instances:
            before = {"Code": instance.state_code, "Name": instance.state}
            if instance.state_code != TERMINATED:
                instance.terminate()
            after = before if before["Code"] == TERMINATED else {"Code": 32, "Name": "shutting-down"}
            changes.append({"InstanceId": instance.id, "PreviousState": before, "CurrentState": after})
        return ActionResult({"TerminatingInstances": changes})

    def delete_security_group(self) -> ActionResult:
        group = self.ec2_backend.get_security_group_by_name_or_id(
            self._get_param("GroupId") or self._get_param("GroupName")
        )
        if group and self._instances.uses_group(self.ec2_backend, group.id):
            raise EC2ClientError("DependencyViolation", f"resource {group.id} has a dependent object")
        return super().delete_security_group()

    def describe_fleets(self) -> ActionResult:
        ids = self._get_param("FleetIds", [])
        filters = self._filters_from_querystring()
        fleets = [fleet for fleet in self._instances.fleets.values() if fleet["region"] == self.region]
        missing = set(ids) - {fleet["FleetId"] for fleet in fleets}
        if missing:
            raise EC2ClientError("InvalidFleetId.NotFound", f"The fleet IDs do not exist: {sorted(missing)}")
        matching = [f for f in fleets if (not ids or f["FleetId"] in ids) and _matches(f, filters)]
        return ActionResult({"Fleets": [{k: v for k, v in fleet.items() if k != "region"} for fleet in matching]})

    def get_console_output(self) -> ActionResult:
        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        log = self._logs / f"{instance.id}.log"
        text = log.read_bytes()[-CONSOLE_BYTES:] if log.exists() else b""
        output = base64.b64encode(text).decode()
        return ActionResult({"InstanceId": instance.id, "Timestamp": iso(time.time()), "Output": output})

    def describe_instance_types(self) -> ActionResult:
        return FastXmlResult(super().describe_instance_types().result)

    def describe_instance_type_offerings(self) -> ActionResult:
        return FastXmlResult(super().describe_instance_type_offerings().result)

    def describe_spot_price_history(self) -> ActionResult:
        filters = {key: set(values) for key, values in self._filters_from_querystring().items()}
        types = set(self._get_param("InstanceTypes", [])) or filters.get("instance-type")
        zone = self._get_param("AvailabilityZone")
        zones = {zone} if zone else filters.get("availability-zone")
        systems = set(self._get_param("ProductDescriptions", [])) or filters.get("product-description")
        rows = [] if systems and LINUX not in systems else _spot_prices(self.region, types, zones)
        start = int(self._get_param("NextToken") or 0)
        end = start + min(int(self._get_param("MaxResults") or PRICE_PAGE), PRICE_PAGE)
        token = str(end) if end < len(rows) else ""
        return FastXmlResult({"SpotPriceHistory": rows[start:end], "NextToken": token})


def _spot_prices(region: str, types: set[str] | None, zones: set[str] | None) -> list[dict[str, str]]:
    """Return the current price of every spot type in every zone that offers it."""
    fixed = {"ProductDescription": LINUX, "Timestamp": iso(time.time())}
    return [
        {**fixed, "InstanceType": name, "AvailabilityZone": zone, "SpotPrice": f"{price:.6f}"}
        for (name, zone), machine in offered_types(region).items()
        if (not types or name in types) and (not zones or zone in zones)
        if "spot" in INSTANCE_TYPES[name]["SupportedUsageClasses"]
        if (price := prices.spot_usd_per_hour(machine, zone))
    ]


def _matches(fleet: Mapping[str, Any], filters: Mapping[str, Sequence[str]]) -> bool:
    tags = {tag["Key"]: tag["Value"] for tag in fleet["Tags"]}
    values = {f"tag:{key}": {value} for key, value in tags.items()}
    values |= {"tag-key": set(tags), "fleet-state": {fleet["FleetState"]}, "type": {fleet["Type"]}}
    return all(values.get(name, set()) & set(wanted) for name, wanted in filters.items())
