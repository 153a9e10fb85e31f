"""The peers' own virtual environment, so that their pins do not meet the product's."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HOME = Path("~/.cache/idletrain/peers").expanduser()
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
READY = "requirements.txt"  # a copy, written last: what is installed


def installed() -> bool:
    """Return whether the environment exists with exactly these pins."""
    mark = HOME / READY
    return mark.exists() and mark.read_text() == REQUIREMENTS.read_text()


def python() -> Path:
    """Return the environment's interpreter, made if need be (250 MB, some minutes; pip shows its progress).

    Raises:
        RuntimeError: pip could not install the pins.
    """
    interpreter = HOME / "bin" / "python"
    if not installed():
        sys.stderr.write(f"installing the peers into {HOME}\n")
        venv.create(HOME, clear=True, with_pip=True)
        command = [str(interpreter), "-m", "pip", "install", "--prefer-binary", "-r", str(REQUIREMENTS)]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"pip could not install {REQUIREMENTS}; see its messages above")
        (HOME / READY).write_text(REQUIREMENTS.read_text())
    return interpreter


if __name__ == "__main__":
    python()
