"""A machine's own deadline, in words that a shell really runs."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from idletrain.cloud.aws import user_data

SHIM = '#!/bin/bash\necho "$(basename "$0") $@"\n'


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def booted(text: str, place: Path) -> tuple[list[str], str]:
    """Run a script whose every command only says what it was asked; returns that, and what is kept for next boots."""
    for name in ("shutdown", "docker"):
        (place / name).write_text(SHIM)
        (place / name).chmod(0o755)
    (place / "install").write_text(
        f'#!/bin/bash\n[ "$*" = "-D /dev/stdin {user_data.PER_BOOT}" ] && cat > {place}/kept\n'
    )
    (place / "install").chmod(0o755)
    environment = {"PATH": f"{place}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines(), (place / "kept").read_text()


def test_user_data_arms_the_deadline_before_anything_else_and_is_short_and_without_secrets() -> None:
    text = user_data.user_data(7200.0, "r/idletrain:1", gpu=True)
    assert text.startswith("#!/bin/bash\n")
    assert commands(text)[0] == "deadline=7200"
    assert commands(text)[1].startswith("shutdown -h +")
    assert commands(text)[-2:] == ["docker run --rm --network host --gpus all r/idletrain:1 node", "shutdown -h now"]
    assert len(text) < user_data.BOOT_SCRIPT_BYTES
    assert "PRIVATE KEY" not in text


def test_an_image_of_the_account_s_own_registry_is_logged_in_for() -> None:
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/idletrain:1"
    login, run, _ = commands(user_data.user_data(7200.0, image))[-3:]
    assert "ecr get-login-password --region eu-west-1 | docker login" in login
    assert login.endswith("--password-stdin 123456789012.dkr.ecr.eu-west-1.amazonaws.com")
    assert run.endswith(f"{image} node")


def test_user_data_of_more_than_4_kb_is_an_error() -> None:
    with pytest.raises(ValueError, match="4096"):
        user_data.user_data(100.0, "image" * 1000)


@pytest.mark.parametrize(("left_seconds", "minutes"), [(7200, 119), (600, 9), (30, 1), (-600, 1)])
def test_the_deadline_is_the_run_s_for_a_machine_that_boots_later_and_armed_when_it_has_passed(
    left_seconds: int, minutes: int, tmp_path: Path
) -> None:
    output, _ = booted(user_data.user_data(time.time() + left_seconds + 5, "image"), tmp_path)
    assert output == [f"shutdown -h +{minutes}", "docker run --rm --network host image node", "shutdown -h now"]


def test_a_rebooted_machine_has_the_same_deadline_and_not_a_new_one(tmp_path: Path) -> None:
    deadline = int(time.time()) + 7205
    for text in (user_data.user_data(deadline, "image"), user_data.user_data_for(7205, "image")):
        output, per_boot = booted(text, tmp_path)
        assert per_boot.startswith("#!/bin/bash\n")
        assert output[0] == "shutdown -h +119"
        (until,) = re.findall(r"\((\d+) - ", per_boot)
        assert int(until) == pytest.approx(deadline, abs=2)
        later = per_boot.replace(until, str(int(until) - 3600))  # as if an hour had passed
        assert booted(f"{text}\n{later}", tmp_path)[0][-1] == "shutdown -h +59"


def test_a_machine_that_is_made_again_and_again_lives_as_long_each_time(tmp_path: Path) -> None:
    output, _ = booted(user_data.user_data_for(1800.0, "image"), tmp_path)
    assert output[0] == "shutdown -h +29"
