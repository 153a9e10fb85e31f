"""Prices are the same every time, near the real ones, and spot is cheaper than on demand."""

from __future__ import annotations

import pytest

from idletrain.cloud.sandbox.prices import Hardware, hardware, on_demand_usd_per_hour, spot_usd_per_hour

T4 = {
    "InstanceType": "g4dn.xlarge",
    "VCpuInfo": {"DefaultVCpus": 4},
    "MemoryInfo": {"SizeInMiB": 16384},
    "GpuInfo": {"Gpus": [{"Name": "T4", "Count": 1, "MemoryInfo": {"SizeInMiB": 16384}}]},
    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
    "BurstablePerformanceSupported": False,
}


def machine(name: str, vcpus: int, memory_gib: float) -> Hardware:
    return Hardware(name=name, vcpus=vcpus, memory_gib=memory_gib)


@pytest.mark.parametrize(
    ("kind", "usd_per_hour"),
    [
        (machine("c5.large", 2, 4), 0.096),
        (machine("m5.large", 2, 8), 0.107),
        (machine("r5.4xlarge", 16, 128), 1.128),
        (hardware(T4), 0.587),
    ],
)
def test_list_prices_of_common_types_are_met_within_a_tenth(kind: Hardware, usd_per_hour: float) -> None:
    assert on_demand_usd_per_hour(kind) == pytest.approx(usd_per_hour, rel=0.1)


def test_hardware_is_read_from_what_ec2_describes() -> None:
    described = hardware(
        {
            **T4,
            "ProcessorInfo": {"SupportedArchitectures": ["arm64"]},
            "GpuInfo": {"Gpus": [{"Name": "new", "Count": 2, "MemoryInfo": {"SizeInMiB": 10240}}]},
        }
    )
    assert (described.name, described.vcpus, described.memory_gib, described.arm) == ("g4dn.xlarge", 4, 16.0, True)
    assert described.gpus_usd_per_hour == pytest.approx(1.2)


def test_a_gpu_costs_extra_and_other_processors_less() -> None:
    plain = machine("x", 4, 16)
    price = on_demand_usd_per_hour(plain)
    assert on_demand_usd_per_hour(Hardware(name="x", vcpus=4, memory_gib=16, gpus_usd_per_hour=1.0)) == price + 1
    assert on_demand_usd_per_hour(Hardware(name="x", vcpus=4, memory_gib=16, arm=True)) < price
    assert on_demand_usd_per_hour(Hardware(name="x", vcpus=4, memory_gib=16, burstable=True)) < price


def test_spot_prices_differ_by_zone_stay_the_same_and_are_below_on_demand() -> None:
    kind = machine("m5.large", 2, 8)
    prices = [spot_usd_per_hour(kind, f"eu-west-1{zone}") for zone in "abc"]
    assert len(set(prices)) == 3
    assert prices == [spot_usd_per_hour(kind, f"eu-west-1{zone}") for zone in "abc"]
    shares = [price / on_demand_usd_per_hour(kind) for price in prices]
    assert all(0.29 < share < 0.66 for share in shares)
