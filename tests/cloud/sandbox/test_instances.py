"""Instances end for the reason they ended for, and have addresses that only this machine has."""

from __future__ import annotations

import ipaddress

from rehearsal import Sandbox, eventually


def ended(cloud: Sandbox, instance: str, reason: str, state: str = "terminated") -> None:
    """Wait for an instance's end, and check why."""
    described = eventually(lambda: (s := cloud.state(instance))["State"]["Name"] == state and s)
    assert described["StateReason"]["Code"] == reason


def test_a_program_that_ends_terminates_its_instance(cloud: Sandbox) -> None:
    (id_,) = cloud.start("exit 3")
    ended(cloud, id_, "Client.InstanceInitiatedShutdown")
    eventually(lambda: cloud.inventory()["processes"] == [])


def test_a_shutdown_now_terminates_at_once(cloud: Sandbox) -> None:
    (id_,) = cloud.start("shutdown -h now; sleep 300")
    ended(cloud, id_, "Client.InstanceInitiatedShutdown")


def test_a_shutdown_later_ends_the_machine_at_its_time_and_not_before(cloud: Sandbox) -> None:
    (id_,) = cloud.start("shutdown -h +1 && echo armed; sleep 300")
    eventually(lambda: "armed" in cloud.log(id_))
    assert cloud.inventory()["instances"] == [id_]
    cloud.ask("POST", "shutdown", instance=id_, seconds=0.1)  # in place of the minute
    ended(cloud, id_, "Client.InstanceInitiatedShutdown")


def test_an_on_demand_instance_whose_shutdown_only_stops_it_is_left_behind(cloud: Sandbox) -> None:
    (id_,) = cloud.start("exit 0", market="on-demand", InstanceInitiatedShutdownBehavior="stop")
    ended(cloud, id_, "Client.InstanceInitiatedShutdown", state="stopped")
    assert cloud.inventory()["instances"] == [id_]


def test_a_reclaimed_spot_instance_says_so(cloud: Sandbox) -> None:
    (id_,) = cloud.start("sleep 300")
    eventually(lambda: cloud.pids(id_))
    cloud.ask("POST", "take", instance=id_)
    ended(cloud, id_, "Server.SpotInstanceTermination")
    eventually(lambda: not cloud.pids(id_))


def test_every_instance_has_a_loopback_address_of_its_own_and_no_public_one(cloud: Sandbox) -> None:
    ids = cloud.start("sleep 300", 3)
    states = [cloud.state(id_) for id_ in ids]
    addresses = {state["PrivateIpAddress"] for state in states}
    assert len(addresses) == 3
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)
    assert "127.0.0.1" not in addresses
    assert all("PublicIpAddress" not in state for state in states)
    assert [s["NetworkInterfaces"][0]["PrivateIpAddress"] for s in states] == [s["PrivateIpAddress"] for s in states]
