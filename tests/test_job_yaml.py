"""What the YAML of a job file means."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from idletrain import job_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("17", 17),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", float("-inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        *((text, text) for text in ("on", "yes", "No", "017", "0o17", "1:30", "1:30.5", "2024-01-01", "1.2.3", "~/x")),
    ],
)
def test_numbers_and_words_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = job_yaml.parse_yaml(f"key: {text}")["key"]
    assert (found, type(found)) == (value, type(value))


def test_only_plain_values_are_made() -> None:
    with pytest.raises(yaml.YAMLError):
        job_yaml.parse_yaml("key: !!python/object/apply:os.getcwd []")


def test_loaders_of_others_are_as_before() -> None:
    assert yaml.safe_load("on: 017") == {True: 15}
