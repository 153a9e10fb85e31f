"""Faults are met once each, in order, and look like the service's own errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from idletrain.cloud.sandbox.faults import InjectedFault, InjectedFaults, error


def test_a_fault_is_met_as_often_as_it_says_and_by_its_action_only() -> None:
    faults = InjectedFaults()
    faults.add(InjectedFault(action="CreateFleet", code="First", times=2))
    faults.add(InjectedFault(action="CreateFleet", code="Second"))
    assert faults.take("RunInstances") is None
    assert faults.remaining() == [
        {"action": "CreateFleet", "mode": "error", "times": 2},
        {"action": "CreateFleet", "mode": "error", "times": 1},
    ]
    met = [faults.take("CreateFleet") for _ in range(4)]
    assert [fault and fault.code for fault in met] == ["First", "First", "Second", None]
    assert faults.remaining() == []


@pytest.mark.parametrize(("service", "path"), [("ec2", "Errors/Error"), ("iam", "Error"), ("s3", ".")])
def test_an_error_is_the_services_xml(service: str, path: str) -> None:
    status, kind, body = error(service, "Throttling", "too <fast>", 503)
    element = ET.fromstring(body).find(path)
    assert element is not None
    assert (status, element.findtext("Code"), element.findtext("Message")) == (503, "Throttling", "too <fast>")
    assert kind.endswith("/xml")


def test_an_error_of_a_json_service_is_json() -> None:
    status, _, body = error("ssm", "ThrottlingException", "slowly", 400)
    assert (status, json.loads(body)) == (400, {"__type": "ThrottlingException", "message": "slowly"})
