"""Plain answers are written as the service's model says, and read back as they were."""

from __future__ import annotations

from rehearsal import Sandbox


def test_a_catalogue_is_read_back_as_it_was_written(cloud: Sandbox) -> None:
    (kind,) = cloud.ec2.describe_instance_types(InstanceTypes=["g4dn.xlarge"])["InstanceTypes"]
    assert (kind["VCpuInfo"]["DefaultVCpus"], kind["MemoryInfo"]["SizeInMiB"]) == (4, 16384)
    assert kind["GpuInfo"]["Gpus"][0]["Name"] == "T4"
    assert kind["ProcessorInfo"] == {
        "Manufacturer": "Intel",
        "SupportedArchitectures": ["x86_64"],
        "SustainedClockSpeedInGhz": 2.5,
    }
    assert (kind["CurrentGeneration"], kind["BareMetal"]) == (True, False)
    assert set(kind["SupportedUsageClasses"]) == {"on-demand", "spot"}


def test_what_every_zone_offers(cloud: Sandbox) -> None:
    filters = [{"Name": "location", "Values": ["eu-west-1a"]}, {"Name": "instance-type", "Values": ["m5.large"]}]
    query = {"LocationType": "availability-zone", "Filters": filters}
    assert cloud.ec2.describe_instance_type_offerings(**query)["InstanceTypeOfferings"] == [
        {"InstanceType": "m5.large", "LocationType": "availability-zone", "Location": "eu-west-1a"}
    ]
