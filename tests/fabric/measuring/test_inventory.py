"""The description of a node."""

from __future__ import annotations

import psutil

from idletrain.fabric.measuring import inventory


def test_this_node() -> None:
    node = inventory.describe("127.0.0.1")
    assert (node["interface"], node["mtu"]) == ("lo", psutil.net_if_stats()["lo"].mtu)
    assert node["link_bits_per_second"] is None  # loopback has no device
    assert node["gloo"]
    assert node["cores"] >= 1
    assert node["torch"]
    assert node["kernel"]
    assert (node["gpudirect"] == "no GPU") == (not node["gpus"])


def test_an_address_that_is_not_here_has_no_interface() -> None:
    assert inventory.interface_of("203.0.113.9") == ("", None, None)


def test_differing_versions_are_named_with_their_nodes() -> None:
    nodes = [
        {"name": "a", "torch": "2.13", "distributed": "1", "python": "3.11"},
        {"name": "b", "torch": "2.12", "distributed": "1", "python": "3.11"},
        {"name": "c", "torch": "2.13", "distributed": "1", "python": "3.11"},
    ]
    assert inventory.unlike_versions(nodes) == [
        "torch is not the same on all nodes (2.12 on b; 2.13 on a, c); install the same"
    ]
    assert inventory.unlike_versions(nodes[::2]) == []
