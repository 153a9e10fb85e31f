"""Virtual environments of what benchmarks compare with, so that its pins do not meet the product's."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HOME = Path("~/.cache/idletrain").expanduser()


class Environment:
    """The packages of `benchmarks/NAME/requirements.txt`, in a virtual environment of their own."""

    def __init__(self, name: str, *options: str) -> None:
        self._home = HOME / name
        self._pins = Path(__file__).parent / name / "requirements.txt"
        self._mark = self._home / "requirements.txt"  # a copy, written last: what is installed
        self._options = options

    def installed(self) -> bool:
        """Return whether the environment exists with exactly these pins."""
        return self._mark.exists() and self._mark.read_text() == self._pins.read_text()

    def python(self) -> Path:
        """Return the environment's interpreter, made if need be (some minutes; pip shows its progress).

        Raises:
            RuntimeError: pip could not install the pins.
        """
        interpreter = self._home / "bin" / "python"
        if not self.installed():
            sys.stderr.write(f"installing {self._pins} into {self._home}\n")
            venv.create(self._home, clear=True, with_pip=True)
            install = ["-m", "pip", "install", "--prefer-binary", *self._options, "-r", str(self._pins)]
            if subprocess.run([interpreter, *install], check=False).returncode:
                raise RuntimeError(f"pip could not install {self._pins}; see its messages above")
            self._mark.write_text(self._pins.read_text())
        return interpreter


PEERS, MODULES = Environment("peers"), Environment("modules", "--no-deps")

if __name__ == "__main__":
    PEERS.python()
