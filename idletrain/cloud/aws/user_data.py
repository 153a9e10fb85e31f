"""What a machine runs when it boots: its own deadline first, then the container image. Pure.

A reboot loses a shutdown that is due and does not run user data again, so the deadline, as a point in time, also goes
into the folder of what cloud-init runs at every boot (cloud-init, "Scripts Per Boot"), which Amazon Linux has.
"""

from __future__ import annotations

import shlex

BOOT_SCRIPT_BYTES = 4096  # AWS takes 16 KB; what is this short can be read at a glance, and holds no secret
PER_BOOT = "/var/lib/cloud/scripts/per-boot/idletrain-deadline"
REGISTRY = ".dkr.ecr."
CLI_IMAGE = "public.ecr.aws/aws-cli/aws-cli"


def user_data(deadline: float, image: str, *, gpu: bool = False) -> str:
    """A machine's user data; its own deadline is armed before anything that can fail.

    Args:
        deadline: Unix seconds, the same for machines that boot later.
        image: The container image.
        gpu: Whether the container is given the machine's GPUs.

    Raises:
        ValueError: it would be longer than 4 KB.
    """
    return _script(str(int(deadline)), image, gpu=gpu)


def user_data_for(seconds: float, image: str) -> str:
    """The same for machines that are made of it again and again, and live so long each time."""
    return _script(f"$(( $(date +%s) + {int(seconds)} ))", image, gpu=False)


def _script(deadline: str, image: str, *, gpu: bool) -> str:
    gpus = " --gpus all" if gpu else ""
    text = (
        "#!/bin/bash\n"
        "# The deadline first: whatever happens below, this machine ends by itself, rebooted or not.\n"
        f"deadline={deadline}\n"
        "shutdown -h +$(( left = (deadline - $(date +%s)) / 60 - 1, left > 1 ? left : 1 ))\n"
        f"install -D /dev/stdin {PER_BOOT} <<END\n"
        "#!/bin/bash\n"
        "shutdown -h +\\$(( left = ($deadline - \\$(date +%s)) / 60 - 1, left > 1 ? left : 1 ))\n"
        "END\n"
        f"{_login(image)}docker run --rm --network host{gpus} {shlex.quote(image)} node\n"
        "shutdown -h now\n"
    )
    if len(text) > BOOT_SCRIPT_BYTES:
        raise ValueError(f"user data of {len(text)} bytes; {BOOT_SCRIPT_BYTES} are meant to do")
    return text


def _login(image: str) -> str:
    """Into the account's own registry, with the machine's role and no tool but Docker; other registries are public."""
    host = image.partition("/")[0]
    if REGISTRY not in host:
        return ""
    ask = f"docker run --rm --network host {CLI_IMAGE} ecr get-login-password --region {host.split('.')[3]}"
    return f"{ask} | docker login --username AWS --password-stdin {shlex.quote(host)}\n"
