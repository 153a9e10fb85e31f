"""Manage the instances of the rehearsed account: moto's records of them, completed by what moto leaves out.

Callers hold `lock`: moto's EC2 is not thread-safe.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from moto.core.types import Base64EncodedString
from moto.ec2.models import ec2_backends
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.utils import random_spot_request_id

from idletrain.cloud.sandbox.capacity import CapacityPool, Limit
from idletrain.cloud.sandbox.launch_spec import LaunchSpec
from idletrain.cloud.sandbox.metadata import Facts

ACCOUNT_ID = "123456789012"  # moto's own
REGION = "eu-west-1"
SPOT_REASON = "Server.SpotInstanceTermination", "Spot instance termination"
SHUTDOWN_REASON = "Client.InstanceInitiatedShutdown", "Instance initiated shutdown"
ADDRESSES = range(2, 255)
TERMINATED = 48  # the code of the state


class NoAddressError(Exception):
    """All private addresses are in use."""


class Instances:
    """The account's instances, with their limits, notices and timers.

    Args:
        network: The first three bytes of the instances' private addresses, `127.x.y.`: on this machine's loopback
            interface, and no other sandbox's.
    """

    def __init__(self, network: str) -> None:
        TaggedEC2Resource.get_tags = _own_tags
        self.lock = threading.RLock()
        self.limits: tuple[Limit, ...] = ()
        self.fleets: dict[str, dict[str, Any]] = {}
        self.shutdowns: dict[str, float] = {}
        """Unix seconds at which an instance's own `shutdown` is due."""
        self.notices: dict[str, float] = {}
        """Unix seconds at which a spot instance is reclaimed."""
        self.rebalances: dict[str, float] = {}
        self._network = network
        self._hosts = itertools.cycle(ADDRESSES)

    # --- queries ----------------------------------------------------------------------------------------------------

    def alive(self) -> list[Instance]:
        """Return the instances in any region that are not terminated, the oldest first."""
        instances = [instance for backend in region_backends() for instance in _not_terminated(backend)]
        return sorted(instances, key=lambda instance: instance.launch_time)

    def running(self) -> list[Instance]:
        """Return the running instances, the oldest first."""
        return [instance for instance in self.alive() if instance.is_running()]

    def takeable(self) -> list[str]:
        """Return the ids of running spot instances without a notice, the oldest first."""
        spot = (instance.id for instance in self.running() if instance.lifecycle == "spot")
        return [id_ for id_ in spot if id_ not in self.notices]

    def pools(self) -> list[CapacityPool]:
        """Return the pool of each instance that uses capacity."""
        return [
            CapacityPool(i.lifecycle or "on-demand", i.instance_type, i.availability_zone or "") for i in self.running()
        ]

    def find(self, id_: str) -> Instance | None:
        """Return an instance by its id, or None if there is none or it is terminated."""
        return next((instance for instance in self.alive() if instance.id == id_), None)

    def facts(self, instance: Instance) -> Facts:
        """Return the metadata of an instance; needs no lock, and so never waits."""
        backend = instance.ec2_backend
        association = backend.iam_instance_profile_associations.get(instance.id)
        roles = association.iam_instance_profile.roles if association else ()
        tagged = instance.metadata_options.instance_metadata_tags == "enabled"
        return Facts(
            instance=instance.id,
            type=instance.instance_type,
            address=instance.private_ip or "",
            region=instance.region_name,
            zone=instance.availability_zone or "",
            tags=dict(backend.tags.get(instance.id, {})) if tagged else None,
            role=roles[0].name if roles else "",
            taken_at=self.notices.get(instance.id),
            rebalance_at=self.rebalances.get(instance.id),
        )

    def uses_group(self, backend: Any, group: str) -> bool:
        """Return whether an instance that is not terminated is in a security group."""
        return any(own.id == group for instance in _not_terminated(backend) for own in instance.security_groups)

    # --- changes ----------------------------------------------------------------------------------------------------

    def launch(self, backend: Any, spec: LaunchSpec, subnet: str, count: int, token: str | None) -> Any:
        """Create instances; return moto's reservation. Their machines boot a moment later.

        Raises:
            NoAddressError: there are too few private addresses.
        """
        addresses = self._free_addresses(count)
        disks = {"block_device_mappings": list(spec.disks)} if spec.disks else {}
        reservation = backend.run_instances(
            spec.image,
            count,
            Base64EncodedString(spec.user_data) if spec.user_data else None,
            [],
            instance_type=spec.type,
            is_instance_type_default=False,
            region_name=backend.region_name,
            subnet_id=subnet,
            security_group_ids=list(spec.groups),
            tags=spec.tags,
            instance_market_options="spot" if spec.market == "spot" else {},
            instance_initiated_shutdown_behavior=spec.on_shutdown,
            metadata_options=spec.metadata_options,
            key_name=spec.key,
            client_token=token,
            **disks,
        )
        for instance, address in zip(reservation.instances, addresses, strict=True):
            self._complete(backend, instance, spec, address)
        return reservation

    def end(self, instance: Instance, reason: tuple[str, str]) -> None:
        """Stop or terminate an instance for another reason than a call of the API."""
        shut_itself_down = reason == SHUTDOWN_REASON and instance.lifecycle != "spot"
        if shut_itself_down and instance.instance_initiated_shutdown_behavior == "stop":
            instance.stop()
        else:
            instance.terminate()
        instance._reason = reason[0]
        instance.state_reason = StateReason(f"{reason[0]}: {reason[1]}", reason[0])

    def forget_the_ended(self) -> None:
        """Delete timers and notices of instances that no longer run."""
        running = {instance.id for instance in self.running()}
        for table in (self.shutdowns, self.notices, self.rebalances):
            for id_ in table.keys() - running:
                del table[id_]

    def due(self, now: float) -> Iterator[tuple[Instance, tuple[str, str]]]:
        """Yield the instances that have to end by now, with the reason."""
        for instance in self.running():
            if self.notices.get(instance.id, now + 1) <= now:
                yield instance, SPOT_REASON
            elif self.shutdowns.get(instance.id, now + 1) <= now:
                yield instance, SHUTDOWN_REASON

    def notice(self, id_: str, seconds: float) -> None:
        """Give a spot instance an interruption notice, and reclaim it after `seconds`."""
        self.notices[id_] = time.time() + seconds

    def shut_down(self, id_: str, seconds: float) -> None:
        """Let an instance shut itself down in `seconds`."""
        self.shutdowns[id_] = time.time() + seconds

    def _complete(self, backend: Any, instance: Instance, spec: LaunchSpec, address: str) -> None:
        if spec.profile:
            backend.associate_iam_instance_profile(instance.id, spec.profile.get("Name"), spec.profile.get("Arn"))
        if spec.market == "spot":
            instance.spot_instance_request_id = random_spot_request_id()
        for nic in instance.nics.values():
            nic.private_ip_address = address
            nic.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": address}]
            nic.public_ip = None  # it would be a stranger's machine
            nic.delete_on_termination = True
            nic._group_set = []  # moto then shows the instance's own groups, also after they are modified
            nic.add_tags(spec.tags.get("network-interface", {}))

    def _free_addresses(self, count: int) -> list[str]:
        used = {instance.private_ip for instance in self.alive()}
        candidates = (self._network + str(next(self._hosts)) for _ in ADDRESSES)
        addresses = list(itertools.islice((address for address in candidates if address not in used), count))
        if len(addresses) < count:
            raise NoAddressError
        return addresses


def region_backends() -> Sequence[Any]:
    """Return moto's EC2 backends of every region that was used."""
    return list(ec2_backends[ACCOUNT_ID].values())


def _not_terminated(backend: Any) -> Iterator[Instance]:
    for reservation in list(backend.reservations.values()):
        yield from (instance for instance in reservation.instances if instance.state_code != TERMINATED)


def _own_tags(resource: Any) -> list[dict[str, str]]:
    """Return a resource's tags; moto's own method scans all tags of all resources each time."""
    tags = resource.ec2_backend.tags.get(resource.id, {})
    return [{"key": key, "value": value, "resource_id": resource.id} for key, value in tags.items()]
