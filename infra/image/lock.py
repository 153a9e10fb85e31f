#!/usr/bin/env python3
"""Write the image's packages with the hashes of their files: what `pip install --require-hashes` installs.

    python3.11 infra/image/lock.py [BUILD]      # cpu (the default), or PyTorch's name of another build, such as cu130

Run it on Linux with the image's Python, after a change of the dependencies or of `constraints.txt`. The packages come
from where pip is configured to look, and from PyTorch's own index of the build; TORCH_INDEX names another one, or none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HEADER = """\
# The image's packages for CPython 3.11 on Linux, x86-64, each by the hash of its file. Written by infra/image/lock.py.
"""
BUILD_TOOLS = ("setuptools",)  # which turn the source into a package, without downloading more


def lines(report: dict[str, Any]) -> list[str]:
    """Return a pip report's packages as lines of a requirements file, sorted by name."""
    found = {}
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        found[name] = f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}"
    return [found[name] for name in sorted(found)]


def resolve(index: str) -> dict[str, Any]:
    """Return pip's report on what it would install: the project's dependencies in the versions of `constraints.txt`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), "--constraint", str(ROOT / "constraints.txt")]
        command += ["--extra-index-url", index] if index else []
        subprocess.run([*command, *project["dependencies"], *BUILD_TOOLS], check=True)
        content: dict[str, Any] = json.loads(report.read_text())
    return content


def main(build: str = "cpu") -> None:
    """Write `requirements-BUILD.txt` beside this file."""
    index = os.environ.get("TORCH_INDEX", f"https://download.pytorch.org/whl/{build}")
    path = Path(__file__).with_name(f"requirements-{build}.txt")
    path.write_text(HEADER + "\n".join(lines(resolve(index))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
