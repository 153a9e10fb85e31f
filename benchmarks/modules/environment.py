"""The catalogue's own virtual environment, so that its pins do not meet the product's."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HOME = Path("~/.cache/idletrain/modules").expanduser()
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
READY = "requirements.txt"  # a copy, written last: what is installed


def python() -> Path:
    """Return the environment's interpreter, made if need be (some minutes; pip shows its progress).

    Raises:
        RuntimeError: pip could not install the pins.
    """
    interpreter, mark = HOME / "bin" / "python", HOME / READY
    if not mark.exists() or mark.read_text() != REQUIREMENTS.read_text():
        sys.stderr.write(f"installing the modules' packages into {HOME}\n")
        venv.create(HOME, clear=True, with_pip=True)
        command = [str(interpreter), "-m", "pip", "install", "--prefer-binary", "--no-deps", "-r", str(REQUIREMENTS)]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"pip could not install {REQUIREMENTS}; see its messages above")
        mark.write_text(REQUIREMENTS.read_text())
    return interpreter


if __name__ == "__main__":
    python()
