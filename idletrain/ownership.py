"""Know the runs that this user started: by a signature of everything in a run directory that can run code.

A run's `job.json` names factories to import and call, and its `program.pkl` is unpickled: whoever writes them decides
what `evaluate` executes. So beside each lies its HMAC-SHA256 with a key of this user's own, which never leaves the
user's state directory (`~/.local/state/idletrain/key`, mode 0600). A directory that somebody else made or changed has
no such signature; one of the user's own may be moved and copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from idletrain.storage import state_folder, write_whole

CODE_FILES = ("job.json", "program.pkl")
SIGNATURE = ".signature"  # behind the name of the file that it signs
SIGNING_KEY_BYTES = 32


def write_signed(path: Path, content: bytes) -> None:
    """Write one of a run directory's `CODE_FILES`, and its signature.

    Without a state directory that can be written there is no signature: the run is then as one of somebody else's.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, content)
    signature = path.with_name(path.name + SIGNATURE)
    try:
        key = _key()
    except OSError:
        signature.unlink(missing_ok=True)
        return
    write_whole(signature, _sign(key, path.name, content))


def started_here(run_dir: Path) -> bool:
    """Return whether this user wrote all that can run code in a run directory."""
    present = [run_dir / name for name in CODE_FILES if os.path.lexists(run_dir / name)]
    try:
        key = _key()
        return bool(present) and all(_is_signed(key, path) for path in present)
    except OSError:
        return False


def _is_signed(key: bytes, path: Path) -> bool:
    signature = path.with_name(path.name + SIGNATURE).read_bytes()
    return hmac.compare_digest(signature, _sign(key, path.name, path.read_bytes()))


def _sign(key: bytes, name: str, content: bytes) -> bytes:
    return hmac.new(key, name.encode() + b"\0" + content, hashlib.sha256).hexdigest().encode()


def _key() -> bytes:
    """Return this user's key; make it at first."""
    state = state_folder()
    path = state / "key"
    if not path.exists():
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=state) as file:  # mode 0600
            file.write(secrets.token_bytes(SIGNING_KEY_BYTES))
            file.flush()
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(file.name, path)
    return path.read_bytes()
