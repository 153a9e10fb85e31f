"""Every field of a job file is explained, by its section or its name."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from idletrain.cli import job_fields
from idletrain.cli.main import app
from idletrain.errors import JobError
from idletrain.job import TrainingSettings


def test_every_section_explains_all_its_fields() -> None:
    sections = {section.path: section for section in job_fields.sections()}
    assert {"", "model", "training", "training.optimizer", "nodes", "cloud"} <= sections.keys()
    training = sections["training"]
    assert {field.path.removeprefix("training.") for field in training.fields} == set(TrainingSettings.model_fields)
    for section in sections.values():
        assert section.meaning
        assert all(field.meaning and field.kind for field in section.fields)


def test_a_field_is_found_by_its_path_or_its_last_part() -> None:
    (field,) = job_fields.named("training.local_steps")
    assert (field.kind, field.default) == ("integer ≥ 1, ≤ 2.14748e+09", "50")
    assert [field.path for field in job_fields.named("local_steps")] == ["training.local_steps"]
    assert {field.path for field in job_fields.named("lr")} == {"training.optimizer.lr", "training.outer_optimizer.lr"}
    assert [field.default for field in job_fields.named("name")] == ["required"]  # its exact path


@pytest.mark.parametrize(
    ("path", "hint"),
    [("trainin", "did you mean training?"), ("local_step", "did you mean local_steps?"), ("§", "`idletrain fields`")],
)
def test_an_unknown_name_leads_to_a_known_one(path: str, hint: str) -> None:
    with pytest.raises(JobError, match=f"{path}: is no field of a job file; {hint}".replace("?", r"\\?")):
        job_fields.named(path)


def test_a_field_without_a_docstring_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings(BaseModel):
        bare: int = 0

    monkeypatch.setattr(job_fields, "Job", Settings)
    with pytest.raises(ValueError, match=r"Settings\.bare has no docstring"):
        list(job_fields.sections())


def test_the_command_shows_sections_fields_and_defaults() -> None:
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["fields", *arguments])
        assert done.exit_code == 0
        return done.output

    assert shown().startswith("name: text, required\n    The run's name")
    assert "`idletrain fields training` shows" in shown()
    assert "training.subnets: integer, default 4\n    Independent subnets in a round." in shown("training")
    assert shown("preemption.policy").count("\n") == 2
