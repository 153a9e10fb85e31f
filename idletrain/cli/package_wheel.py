"""Write the installed idletrain as a wheel, so that an image has the very code that launches into it."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a zip archive: equal code makes equal bytes, of which a build keeps its layers
KIND = b"Wheel-Version: 1.0\nGenerator: idletrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path) -> str:
    """Write idletrain's wheel, from its files as they are installed or checked out; return the wheel's name.

    Its format is that of https://packaging.python.org/en/latest/specifications/binary-distribution-format/.

    Raises:
        OSError: It cannot be written.
    """
    distribution = importlib.metadata.distribution("idletrain")
    name = f"idletrain-{distribution.version}"
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    files = {
        **dict(_code()),
        f"{name}.dist-info/METADATA": about.encode(),
        f"{name}.dist-info/entry_points.txt": (distribution.read_text("entry_points.txt") or "").encode(),
        f"{name}.dist-info/WHEEL": KIND,
    }
    record = [f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items()]
    files[f"{name}.dist-info/RECORD"] = "".join([*record, f"{name}.dist-info/RECORD,,\n"]).encode()
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, EARLIEST)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return f"{name}-py3-none-any.whl"


def _code() -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each of the package's files; folders may be links, as in a clone."""
    for folder, folders, names in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted({*folders} - {"__pycache__"})
        for path in (Path(folder, name) for name in sorted(names)):
            yield f"idletrain/{path.relative_to(PACKAGE).as_posix()}", path.read_bytes()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
