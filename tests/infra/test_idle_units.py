"""The files that lend an idle machine are read as meant by systemd, cron's rules and the shell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

IDLE = Path(__file__).parents[2] / "infra" / "idle"
UNIT = IDLE / "idletrain-worker.service"
PROGRAM = "/opt/idletrain/bin/idletrain"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace(PROGRAM, "/bin/true"))  # it checks that the program is there
    result = subprocess.run([str(ANALYZE), "verify", str(here)], capture_output=True, text=True, check=False)
    complaints = [
        line for line in result.stderr.splitlines() if UNIT.name in line
    ]  # other units of the machine may be odd
    assert (result.returncode, complaints) == (0, [])


def test_the_unit_gives_the_worker_its_notice_once_and_time_to_go() -> None:
    lines = re.sub(r"\\\n\s+", "", UNIT.read_text()).splitlines()
    files = "--tls-ca-file /etc/idletrain/ca-file --tls-cert /etc/idletrain/cert --tls-key /etc/idletrain/key"
    assert f"ExecStart={PROGRAM} worker $SCHEDULER --when-idle 20%% {files}" in lines
    assert {"DynamicUser=yes", "SupplementaryGroups=idletrain"} <= {*lines}  # who may read them
    assert "KillMode=mixed" in lines
    assert "Restart=always" in lines


def test_the_crontab_line_is_what_cron_and_the_shell_take() -> None:
    (line,) = [text for text in (IDLE / "crontab").read_text().splitlines() if not text.startswith("#")]
    when, command = line.split(maxsplit=1)
    assert when == "@reboot"
    assert not re.search(r"(?<!\\)%", command)  # one without a backslash would end the command
    shell = command.replace("\\%", "%")
    subprocess.run(["sh", "-n", "-c", shell], check=True)
    files = "--tls-ca-file worker/ca-file --tls-cert worker/cert --tls-key worker/key"  # cron starts it at home
    assert f"{PROGRAM} worker tls://head.example.org:8786 --when-idle 20% {files}" in shell
