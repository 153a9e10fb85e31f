"""Write the script that a machine runs when it boots: its own deadline first, then the container image. Pure.

A reboot cancels a scheduled shutdown and does not run user data again, so the deadline, as a point in time, is also
written to the folder of scripts that cloud-init runs at every boot (cloud-init, "Scripts Per Boot"; in Amazon Linux).
"""

from __future__ import annotations

import shlex

BOOT_SCRIPT_BYTES = 4096  # AWS takes 16 KB; a script this short can be read at a glance, and holds no secret
PER_BOOT = "/var/lib/cloud/scripts/per-boot/idletrain-deadline"
REGISTRY = ".dkr.ecr."
CLI_IMAGE = "public.ecr.aws/aws-cli/aws-cli"


def user_data(deadline: float, image: str, *, gpu: bool = False) -> str:
    """Return a machine's user data; its own deadline is set before anything that can fail.

    Args:
        deadline: Unix seconds at which the machine shuts down, the same for machines that boot later.
        image: The container image.
        gpu: Whether the container gets the machine's GPUs.

    Raises:
        ValueError: it would be longer than 4 KB.
    """
    return _script(str(int(deadline)), image, gpu=gpu)


def user_data_for(seconds: float, image: str) -> str:
    """Return user data for machines that are started again and again; each shuts down after `seconds`."""
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
        raise ValueError(f"user data of {len(text)} bytes exceeds the limit of {BOOT_SCRIPT_BYTES}")
    return text


def _login(image: str) -> str:
    """Return the command that logs into Amazon's registry with the machine's role, by Docker alone; else nothing."""
    host = image.partition("/")[0]
    if REGISTRY not in host:
        return ""
    password = f"docker run --rm --network host {CLI_IMAGE} ecr get-login-password --region {host.split('.')[3]}"
    return f"{password} | docker login --username AWS --password-stdin {shlex.quote(host)}\n"
