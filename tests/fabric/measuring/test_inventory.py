"""What a node tells of itself."""

from __future__ import annotations

import psutil

from idletrain.fabric.measuring import inventory


def test_this_node() -> None:
    told = inventory.describe("127.0.0.1")
    assert (told["interface"], told["mtu"]) == ("lo", psutil.net_if_stats()["lo"].mtu)
    assert told["link_bits_per_second"] is None  # nothing is behind it
    assert told["gloo"]
    assert told["cores"] >= 1
    assert told["torch"]
    assert told["kernel"]
    assert (told["gpudirect"] == "no GPU") == (not told["gpus"])


def test_an_address_that_is_not_here_has_no_interface() -> None:
    assert inventory.interface_of("203.0.113.9") == ("", None, None)


def test_versions_that_are_not_the_same_everywhere_are_told_with_who_has_them() -> None:
    nodes = [
        {"name": "a", "torch": "2.13", "distributed": "1", "python": "3.11"},
        {"name": "b", "torch": "2.12", "distributed": "1", "python": "3.11"},
        {"name": "c", "torch": "2.13", "distributed": "1", "python": "3.11"},
    ]
    assert inventory.unlike_versions(nodes) == [
        "torch is not the same on all nodes (2.12 on b; 2.13 on a, c); install the same"
    ]
    assert inventory.unlike_versions(nodes[::2]) == []
