"""What it takes to do a run again."""

from __future__ import annotations

import json

import pytest

from idletrain.job_file import parse_job
from idletrain.observe.provenance import PACKAGES, command_line, provenance

SECRET = "https://hooks.example.com/services/T0/B0/s3cret?token=x"


def test_a_run_s_first_record_tells_command_job_versions_and_hardware() -> None:
    tree = {"name": "t", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}, "nodes": {"budget_usd": 5}}
    page = ("http://127.0.0.1:1/idletrain", "port 8787 is in use")
    record = json.loads(json.dumps(provenance(parse_job(tree), "idletrain launch job.yaml", *page)))
    assert record["command"] == "idletrain launch job.yaml"
    assert (record["dashboard"], record["dashboard_note"]) == page
    assert record["job"] == {**tree, "nodes": {"budget_usd": 5.0}}
    assert set(record["versions"]) == {"python", *PACKAGES}
    assert record["hardware"]["cores"] > 0
    assert record["hardware"]["ram_bytes"] > 0


@pytest.mark.parametrize("arguments", [["--webhook", SECRET], [f"--webhook={SECRET}"]])
def test_a_command_is_reported_without_its_secrets(arguments: list[str]) -> None:
    command = command_line(["/usr/bin/idletrain", "launch", "my job.yaml", *arguments, "--resume"])
    assert command.startswith("idletrain launch 'my job.yaml' --webhook")
    assert command.endswith("--resume")
    assert "https://hooks.example.com/..." in command
    assert "s3cret" not in command
    assert "token" not in command


@pytest.mark.parametrize("called", ["/usr/bin/idletrain", "/usr/lib/python3/site-packages/idletrain/__main__.py"])
def test_a_command_can_be_given_to_a_shell_again(called: str) -> None:
    assert command_line([called, "launch", "my job.yaml"]) == "idletrain launch 'my job.yaml'"
