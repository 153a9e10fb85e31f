#!/usr/bin/env python3
"""Write the image's packages with the hashes of their files: what `pip install --require-hashes` installs.

    python3.11 lock.py [BUILD [VERSIONS]]      # cpu (the default), or PyTorch's name of another build, such as cu130

Run it on Linux, x86-64, with a Python 3.11 that has idletrain. VERSIONS is a file of lines `name==version`, and by
default the packages for CPUs that lie beside it. The packages come from where pip is configured to look, and from
PyTorch's own index of the build; TORCH_INDEX names another one, or none.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEADER = """\
# The image's packages for CPython 3.11 on Linux, x86-64, each by the hash of its file. Written by infra/image/lock.py.
"""


def lines(report: dict[str, Any]) -> list[str]:
    """Return a pip report's packages as lines of a requirements file, sorted by name."""
    found = {}
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        found[name] = f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}"
    return [found[name] for name in sorted(found)]


def plain_versions(path: Path) -> str:
    """Return a requirements file's lines `name==version`, without hashes and builds."""
    return "\n".join(re.sub(r"( --hash=|\+).*", "", line) for line in path.read_text().splitlines() if "==" in line)


def resolve(index: str, versions: Path) -> dict[str, Any]:
    """Return pip's report on what it would install: idletrain's dependencies in the given versions."""
    needed = [each for each in importlib.metadata.requires("idletrain") or () if "extra ==" not in each]
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "versions.txt"
        constraints.write_text(plain_versions(versions))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), "--constraint", str(constraints)]
        command += ["--extra-index-url", index] if index else []
        subprocess.run([*command, *needed], check=True)
        content: dict[str, Any] = json.loads(report.read_text())
    return content


def main(build: str = "cpu", versions: str = str(HERE / "requirements-cpu.txt")) -> None:
    """Write `requirements-BUILD.txt` beside this file."""
    index = os.environ.get("TORCH_INDEX", f"https://download.pytorch.org/whl/{build}")
    path = Path(__file__).with_name(f"requirements-{build}.txt")
    path.write_text(HEADER + "\n".join(lines(resolve(index, Path(versions)))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
